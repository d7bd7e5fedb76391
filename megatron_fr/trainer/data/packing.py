"""Which trajectories share a forward: data-parallel ranks and micro-batches, balanced by tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def assign_to_ranks(num_tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """Split indices of trajectories over data-parallel ranks: counts differ by one at most, token loads are balanced.

    Longest first, each to the least loaded rank that still has room (greedy number partitioning).
    """
    floor, extra = divmod(len(num_tokens), ranks)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in _longest_first(num_tokens):
        room = floor + (sum(len(share) > floor for share in shares) < extra)
        rank = min((r for r in range(ranks) if len(shares[r]) < room), key=lambda r: (loads[r], r))
        shares[rank].append(index)
        loads[rank] += num_tokens[index]
    return shares


def pack_micro_batches(num_tokens: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Fill micro-batches up to ``max_tokens`` (first fit, longest first). A longer trajectory gets one of its own."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in _longest_first(num_tokens):
        fitting = next((b for b, left in enumerate(room) if left >= num_tokens[index]), None)
        if fitting is None:
            bins.append([])
            room.append(max_tokens)
            fitting = len(bins) - 1
        bins[fitting].append(index)
        room[fitting] -= num_tokens[index]
    return bins


def plan_micro_batches(
    num_tokens: Sequence[Sequence[int]],
    rank: int,
    *,
    micro_batch_size: int,
    max_tokens: int | None,
    multiple_of: int = 1,
) -> list[list[int]]:
    """The micro-batches of one data-parallel rank, as indices into ``num_tokens[rank]``; some may be empty.

    Every rank gets the same number of them, a multiple of ``multiple_of``, since expert parallelism communicates in
    each. They have ``micro_batch_size`` trajectories, or with ``max_tokens`` at most so many tokens without padding.
    ``num_tokens`` is of every rank's share.
    """
    if max_tokens is None:
        count = -(-max(map(len, num_tokens)) // micro_batch_size)
    else:
        packed = [pack_micro_batches(share, max_tokens) for share in num_tokens]
        count = max(map(len, packed))
    count = -(-count // multiple_of) * multiple_of
    if max_tokens is None:  # similar lengths together
        order = np.argsort(num_tokens[rank], kind="stable")
        return [part.tolist() for part in np.array_split(order, count)]
    return packed[rank] + [[] for _ in range(count - len(packed[rank]))]


def _longest_first(num_tokens: Sequence[int]) -> list[int]:
    return sorted(range(len(num_tokens)), key=lambda i: (-num_tokens[i], i))
