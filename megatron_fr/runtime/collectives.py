"""Calls that one rank makes and whose result, or error, every rank gets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch.distributed as dist

from megatron_fr.errors import MegatronFRError
from megatron_fr.runtime.console import say_what_is_awaited


def from_rank_zero[T](make: Callable[[], T]) -> T:
    """Call :func:`from_source` with rank 0 and the world."""
    return from_source(make, 0, None)


def waiting_for(what: str | Callable[[], str]) -> AbstractContextManager[None]:
    """Call :func:`say_what_is_awaited` on rank 0; nothing on others."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return nullcontext()
    return say_what_is_awaited(what if callable(what) else lambda: what)


def from_source[T](make: Callable[[], T], source: int, group: dist.ProcessGroup | None) -> T:
    """Call ``make`` on global rank ``source`` and return its result on every rank of ``group`` (None: the world).

    Raises:
        MegatronFRError: ``make`` raised one; every rank raises it, so that none is left waiting in a collective.
    """
    box: list[Any] = [None, None]
    if dist.get_rank() == source:
        try:
            box[0] = make()
        except MegatronFRError as error:
            box[1] = error
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(box, src=source, group=group)
    if box[1] is not None:
        raise box[1]
    return cast(T, box[0])
