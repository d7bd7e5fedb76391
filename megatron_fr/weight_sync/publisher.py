"""Bring the engines to a new version while their generations are paused in place, and check that they hold it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_fr.errors import MegatronFRError, SyncError
from megatron_fr.weight_sync.transport import Transport, TransportContext, make_transport

_NAMED = 3
_UNVERIFIED = "set sync.verify=false to go without this check (the probe of fresh tokens, sync.probe_tokens, remains)"

Named = Iterable[tuple[str, torch.Tensor]]
Checksums = dict[str, str]


@dataclass(frozen=True)
class SyncReport:
    """What one sync took: seconds, those of the check (``verify_s``) among them, bytes and tensors of one push."""

    version: int
    seconds: float
    num_bytes: int
    num_tensors: int
    verify_s: float


class WeightPublisher:
    """Owned by trainer rank 0."""

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._engines = context.engines
        self._transport: Transport = make_transport(context)
        self._num_bytes = 0

    def connect(self) -> None:
        """Prepare the transport.

        Raises:
            SyncError: engines cannot be reached this way.
        """
        try:
            self._transport.connect()
        except Exception as error:
            raise self._clear(error) from error

    def publish(self, version: int, *pushes: Named) -> SyncReport:
        """Replace the engines' weights and label them ``version``; running generations are paused, not restarted.

        An engine takes a tensor whose name it does not know, drops it, and answers with success. So the first sync has
        two pushes: between them the engines overwrite their weights with random numbers, and afterwards each must hold
        what it held before. At later syncs (one push) the engines must agree with each other.

        Args:
            pushes: the version's tensors, once for each push.

        Raises:
            SyncError: an engine refused, did not answer, or does not hold what was sent; or the tensors are not the
                model's. The engines' weights must then be taken as broken; their generations stay paused.
        """
        started = time.monotonic()
        verify_s = 0.0
        try:
            self._engines.post("/pause_generation", {"mode": "in_place"})
            self._push(pushes[0], version)
            if self._context.config.verify and (len(pushes) > 1 or len(self._engines.urls) > 1):
                pushed = time.monotonic()
                self._verify(version, pushes[1:])
                verify_s = time.monotonic() - pushed
            self._engines.post("/continue_generation", {})
        except Exception as error:
            raise self._clear(error) from error
        return SyncReport(
            version, time.monotonic() - started, self._num_bytes, len(self._context.shapes), verify_s=verify_s
        )

    def close(self) -> None:
        """Leave the engines."""
        self._transport.close()
        self._engines.close()

    def _push(self, tensors: Named, version: int) -> None:
        self._num_bytes = 0
        self._transport.publish(self._complete(tensors), version)

    def _complete(self, tensors: Named) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass the tensors on.

        Raises:
            SyncError: they are not the model's, each once and in its order.
        """
        shapes = self._context.shapes
        expected, count = iter(shapes.items()), 0
        blame = "The model's table and its parameters disagree; nothing is served from this push"
        for count, (name, tensor) in enumerate(tensors, 1):
            wanted, found = next(expected, None), (name, tuple(tensor.shape))
            if found != wanted:
                raise SyncError(
                    f"tensor {count} of the push is {found}; number {count} of the model's {len(shapes)} is {wanted}. "
                    f"{blame}"
                )
            self._num_bytes += tensor.nbytes
            yield name, tensor
        if (missing := next(expected, None)) is not None:
            raise SyncError(
                f"the push has {count} tensors, the model {len(shapes)}; the first that is missing is {missing}. "
                f"{blame}"
            )

    def _verify(self, version: int, again: Iterable[Named]) -> None:
        try:
            held = self._checksums()
            for push in again:
                self._engines.post("/weights_checker", {"action": "reset_tensors", "selector": "target"})
                self._push(push, version)
                for engine, before, after in zip(self._engines.urls, held, self._checksums(), strict=True):
                    _raise_difference(
                        before,
                        after,
                        f"version {version} was pushed twice, with random weights between: engine {engine} holds other "
                        "values after the second push in {}. The pushes do not set these: the engine's model does not "
                        "know their names, see its log",
                    )
        except SyncError as error:
            raise SyncError(f"{error}; {_UNVERIFIED}") from error
        for engine, checksums in zip(self._engines.urls, held, strict=True):
            _raise_difference(
                held[0],
                checksums,
                f"after the push of version {version}, engines {self._engines.urls[0]} and {engine} differ in {{}}; "
                "see their logs",
            )

    def _checksums(self) -> list[Checksums]:
        """Of each engine's parameters as each of its ranks stores them.

        Rotary tables and what SGLang computes by itself have none.
        """
        answers = self._engines.post("/weights_checker", {"action": "checksum", "selector": "target"})
        return [
            _checksums_of(answer, engine, self._context.engine_tp)
            for engine, answer in zip(self._engines.urls, answers, strict=True)
        ]

    def _clear(self, error: Exception) -> MegatronFRError:
        """The error itself, or what a transport raised as a SyncError that names it."""
        if isinstance(error, MegatronFRError):
            return error
        return SyncError(f"sync.transport={self._context.config.transport}: {type(error).__name__}: {error}")


def _checksums_of(answer: Any, engine: str, engine_tp: int) -> Checksums:
    try:
        ranks = {place["tp_rank"] for rank in answer["ranks"] for place in rank["parallelism_info"]}
        found = {
            f"{name} of rank {place['rank']}" if engine_tp > 1 else name: checksum
            for rank in answer["ranks"]
            for place in rank["parallelism_info"]
            for name, checksum in rank["checksums"].items()
        }
    except (KeyError, TypeError, AttributeError):
        ranks, found = set(), {}
    if ranks != set(range(engine_tp)) or not found:
        raise SyncError(
            f"engine {engine}/weights_checker answered {str(answer)[:300]}, not with checksums of {engine_tp} TP ranks"
        )
    return found


def _raise_difference(first: Checksums, second: Checksums, message: str) -> None:
    """Raise ``message`` with the names whose checksums differ in place of its braces, if there are any."""
    names = {**first, **second}
    wrong = [name for name in names if first.get(name) != second.get(name)]
    if wrong:
        listed = ", ".join(wrong[:_NAMED]) + (", ..." if len(wrong) > _NAMED else "")
        raise SyncError(message.format(f"{len(wrong)} of {len(names)} parameters ({listed})"))
