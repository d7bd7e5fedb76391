"""From trajectories to micro-batches: assignment to data-parallel ranks, padding, and rank-ordered routes.

Position ``t`` of a row processes token ``t`` and predicts token ``t + 1``. The last token is never processed, so a row
of ``N`` tokens has ``N - 1`` positions, exactly the rows that its routes have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_fr.trainer.routing_replay import MicroBatchRoutes, padding_routes
from megatron_fr.trajectory import Trajectory


@dataclass(frozen=True)
class RouteShape:
    """Of the model's routes; ``num_layers`` is 0 for dense models."""

    num_layers: int
    top_k: int
    num_experts: int


@dataclass(frozen=True)
class SequenceSlice:
    """Which part of the sequence this tensor-parallel rank's routers see under sequence parallelism."""

    rank: int = 0
    size: int = 1


@dataclass
class MicroBatch:
    """``b`` rows padded to ``P`` positions, on the trainer's device.

    Attributes:
        tokens, targets, position_ids: int64 ``[b, P]``.
        action_mask: bool ``[b, P]``, true where the *target* was sampled by the policy.
        behavior_logprobs: float32 ``[b, P]`` of the target, 0 elsewhere.
        advantages: float32 ``[b]``.
        versions: int32 ``[b, P]`` of the target.
        routes: for routing replay, or None.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    action_mask: torch.Tensor
    behavior_logprobs: torch.Tensor
    versions: torch.Tensor
    advantages: torch.Tensor
    routes: MicroBatchRoutes | None

    @property
    def num_positions(self) -> int:
        """``P``."""
        return self.tokens.shape[1]


def assign_to_ranks(num_tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """Split trajectories over data-parallel ranks: counts differ by one at most, token loads are balanced.

    Longest first, each to the least loaded rank that still has room (greedy number partitioning).

    Returns:
        for each rank the indices into ``num_tokens``.
    """
    total = len(num_tokens)
    floor, extra = divmod(total, ranks)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(total), key=lambda i: (-num_tokens[i], i)):
        full_ranks = sum(len(share) > floor for share in shares)
        open_ranks = [
            r for r in range(ranks) if len(shares[r]) < floor or (len(shares[r]) == floor and full_ranks < extra)
        ]
        rank = min(open_ranks, key=lambda r: (loads[r], r))
        shares[rank].append(index)
        loads[rank] += num_tokens[index]
    return shares


def split_micro_batches(num_tokens: Sequence[int], count: int) -> list[list[int]]:
    """Split a rank's trajectories into exactly ``count`` micro-batches of near-equal size, similar lengths together.

    Every rank has to run the same number of micro-batches, since expert parallelism communicates in each; with fewer
    trajectories than micro-batches some are empty.
    """
    order = sorted(range(len(num_tokens)), key=lambda i: (num_tokens[i], i))
    return [[int(i) for i in part] for part in np.array_split(np.array(order, dtype=np.int64), count)]


def build_micro_batch(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float],
    *,
    pad_multiple: int = 1,
    route_shape: RouteShape | None = None,
    sequence_slice: SequenceSlice = SequenceSlice(),
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Pad trajectories to a rectangle.

    Args:
        pad_multiple: ``P`` is a multiple of it (TP under sequence parallelism).
        route_shape: replay routes of this shape; None for no replay. A trajectory without routes uses the live router.
        sequence_slice: the sequence-parallel part whose routes this rank needs.

    An empty list gives one row without action tokens: its loss is 0 and still connected to the graph.
    """
    rows = max(1, len(trajectories))
    longest = max((len(t) - 1 for t in trajectories), default=1)
    positions = -(-longest // pad_multiple) * pad_multiple
    tokens = np.zeros((rows, positions), dtype=np.int64)
    targets = np.zeros((rows, positions), dtype=np.int64)
    mask = np.zeros((rows, positions), dtype=np.bool_)
    behavior = np.zeros((rows, positions), dtype=np.float32)
    versions = np.full((rows, positions), -1, dtype=np.int32)
    for row, t in enumerate(trajectories):
        n = len(t) - 1
        tokens[row, :n] = t.tokens[:-1]
        targets[row, :n] = t.tokens[1:]
        mask[row, :n] = t.action_mask[1:]
        behavior[row, :n] = np.where(t.action_mask[1:], t.behavior_logprobs[1:], 0.0)
        versions[row, :n] = t.versions[1:]
    to = lambda array: torch.from_numpy(array).to(device)  # noqa: E731
    return MicroBatch(
        tokens=to(tokens),
        targets=to(targets),
        position_ids=torch.arange(positions, device=device).expand(rows, positions).contiguous(),
        action_mask=to(mask),
        behavior_logprobs=to(behavior),
        versions=to(versions),
        advantages=torch.tensor(list(advantages) or [0.0], dtype=torch.float32, device=device),
        routes=_routes(trajectories, positions, route_shape, sequence_slice, device) if route_shape else None,
    )


def _routes(
    trajectories: Sequence[Trajectory],
    positions: int,
    shape: RouteShape,
    part: SequenceSlice,
    device: torch.device | str,
) -> MicroBatchRoutes:
    rows = max(1, len(trajectories))
    padding = padding_routes(positions * rows, shape.num_layers, shape.top_k, shape.num_experts)
    experts = padding.view(positions, rows, shape.num_layers, shape.top_k)
    # Padding is forced, a real token without routes is not.
    given = torch.ones((positions, rows), dtype=torch.bool)
    counted = torch.zeros((positions, rows), dtype=torch.bool)
    for row, t in enumerate(trajectories):
        n = len(t) - 1
        if t.routed_experts is None:
            given[:n, row] = False
        else:
            experts[:n, row] = torch.from_numpy(t.routed_experts.astype(np.int64))
            counted[:n, row] = True
    width = positions // part.size
    local = slice(part.rank * width, (part.rank + 1) * width)
    return MicroBatchRoutes(
        experts=experts[local].reshape(width * rows, shape.num_layers, shape.top_k).to(device),
        given=given[local].reshape(-1).to(device),
        counted=counted[local].reshape(-1).to(device),
    )
