"""Which rows of one tensor are which rows of another, found out from the weight rules themselves.

A rule is applied to tensors that have, in place of each row of weights, that row's number. What comes out says where
every row came from. So bytes can be copied from file to file without a second statement of the mapping.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from megatron_fr.models.mappings import WeightMapping
from megatron_fr.models.sizes import Sizes

_SOURCE = 1 << 40  # more than any tensor has rows


@dataclass(frozen=True)
class Run:
    """Rows ``start`` to ``stop`` of tensor number ``source``."""

    source: int
    start: int
    stop: int


@functools.lru_cache(maxsize=4096)
def piece_runs(rule: WeightMapping, dims: Sizes, rank: int, size: int, part: int) -> tuple[Run, ...] | None:
    """The rows of the Hugging Face tensors that make up a piece (:meth:`WeightMapping.piece`), in order.

    None where the piece is not made of whole rows: it is cut along columns, or has padding.
    """
    if rule.axis == 1 and size > 1:
        return None
    sources = [_numbered(i, shape) for i, shape in enumerate(rule.hf_shapes(dims))]
    return _runs(rule.piece(sources, replace(dims, hidden=1), rank, size, part))


@functools.lru_cache(maxsize=256)
def gather_runs(rule: WeightMapping, dims: Sizes) -> tuple[tuple[Run, ...], ...]:
    """For each Hugging Face tensor the rows of the whole parameter (TP size 1, not padded) that make it up."""
    numbered = _numbered(0, whole_shape(rule, dims))
    found = [_runs(tensor) for tensor in rule.gather([numbered], replace(dims, hidden=1))]
    return tuple(runs for runs in found if runs is not None)


@functools.lru_cache(maxsize=256)
def piece_shape(rule: WeightMapping, dims: Sizes, rank: int, size: int, part: int) -> tuple[int, ...]:
    """The shape of :meth:`WeightMapping.piece`."""
    meta = [torch.empty(shape, device="meta") for shape in rule.hf_shapes(dims)]
    return tuple(rule.piece(meta, dims, rank, size, part).shape)


@functools.lru_cache(maxsize=256)
def whole_shape(rule: WeightMapping, dims: Sizes) -> tuple[int, ...]:
    """The shape of the whole parameter, as TP size 1 has it, its vocabulary not padded."""
    meta = [torch.empty(shape, device="meta") for shape in rule.hf_shapes(dims)]
    return tuple(rule.shard(meta, dims, 0, 1).shape)


def _numbered(source: int, shape: tuple[int, ...]) -> torch.Tensor:
    """int64 ``[rows]`` or ``[rows, 1]``: each row's number and its tensor's; 0 is left for padding."""
    return torch.arange(1, shape[0] + 1).reshape(-1, *[1] * (len(shape) - 1)) + source * _SOURCE


def _runs(numbered: torch.Tensor) -> tuple[Run, ...] | None:
    rows = numbered.reshape(-1)
    if bool((rows == 0).any()):
        return None
    breaks = (torch.nonzero(rows.diff() != 1).reshape(-1) + 1).tolist()
    runs = []
    for first, last in zip([0, *breaks], [*breaks, len(rows)], strict=True):
        source, row = divmod(int(rows[first]), _SOURCE)
        runs.append(Run(source, row - 1, row - 1 + last - first))
    return tuple(runs)
