"""From trajectories to one rank's micro-batches: padded or packed, split over context ranks, with rank-ordered routes.

Position ``t`` of a trajectory processes token ``t`` and predicts token ``t + 1``. So a trajectory of ``N`` tokens has
``N - 1`` positions, and its routes as many rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_fr.models.layers.zigzag import zigzag_positions
from megatron_fr.trainer.routing_replay import MicroBatchRoutes, padding_routes
from megatron_fr.trajectory import Trajectory


@dataclass(frozen=True)
class RouteShape:
    """Shape of the routes that this rank replays."""

    columns: tuple[int, ...]  # its MoE layers' places in a trajectory's routes
    top_k: int
    num_experts: int


@dataclass(frozen=True)
class BatchLayout:
    """How one rank sees a micro-batch."""

    packed: bool = False  # sequences stand one after the other in a single row, instead of one padded row each
    sequence_rank: int = 0  # the sequence-parallel part whose routes this rank needs
    sequence_size: int = 1
    context_rank: int = 0  # the zig-zag part whose tokens this rank holds
    context_size: int = 1


@dataclass(frozen=True)
class RowView:
    """Where the trajectories of a packed micro-batch are."""

    index: torch.Tensor  # int64 [b, W] into its tokens, 0 where not valid
    valid: torch.Tensor  # bool [b, W]


@dataclass
class MicroBatch:
    """This rank's tokens, ``r`` rows of ``c``, on the trainer's device. Padded: ``r = b`` trajectories; packed: 1."""

    tokens: torch.Tensor  # int64 [r, c]
    targets: torch.Tensor  # int64 [r, c]
    position_ids: torch.Tensor  # int64 [r, c], position in the trajectory
    padding: torch.Tensor  # bool [r, c], whether no token of a trajectory is processed
    action_mask: torch.Tensor  # bool [r, c], whether the *target* was sampled by the policy
    behavior_logprobs: torch.Tensor  # float32 [r, c] of the target, 0 elsewhere
    versions: torch.Tensor  # int32 [r, c] of the target
    advantages: torch.Tensor  # float32 [b]
    rewards: torch.Tensor  # float32 [b]
    routes: MicroBatchRoutes | None  # None without routing replay
    packed_seq_params: PackedSeqParams | None  # for the attention, None when padded
    rows: RowView | None  # None when padded
    old_logprobs: torch.Tensor | None = None  # float32 [r, c], before the update; None in the first of its steps

    def by_trajectory(self, tokens: torch.Tensor) -> torch.Tensor:
        """A ``[r, c]`` tensor as ``[b, W]``, one trajectory a row; unused slots hold the first token's value."""
        return tokens if self.rows is None else tokens.reshape(-1)[self.rows.index]

    @property
    def trajectory_mask(self) -> torch.Tensor:
        """``action_mask`` as ``[b, W]``, false on slots that hold no token of the trajectory."""
        mask = self.by_trajectory(self.action_mask)
        return mask if self.rows is None else mask & self.rows.valid


def build_micro_batch(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float],
    *,
    layout: BatchLayout = BatchLayout(),
    route_shape: RouteShape | None = None,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Lay trajectories out as this rank sees them; ``route_shape`` is None without routing replay.

    An empty list gives one sequence without action tokens: its loss is 0 and still connected to the graph. A trajectory
    without routes uses the live router.
    """
    spans = _place(trajectories, layout)
    parts = [start + zigzag_positions(length, layout.context_rank, layout.context_size) for start, length in spans]
    # Whole micro-batch first, [rows, positions] flattened; each rank then takes its columns.
    columns = torch.cat(parts).view(1 if layout.packed else len(spans), -1)
    width = sum(spans[-1])
    tokens, targets, positions = (np.zeros(width, dtype=np.int64) for _ in range(3))
    mask, padding = np.zeros(width, dtype=np.bool_), np.ones(width, dtype=np.bool_)
    behavior = np.zeros(width, dtype=np.float32)
    versions = np.full(width, -1, dtype=np.int32)
    for start, length in spans:
        positions[start : start + length] = np.arange(length)
    for (start, _), t in zip(spans, trajectories, strict=False):
        here = slice(start, start + len(t) - 1)
        tokens[here] = t.tokens[:-1]
        targets[here] = t.tokens[1:]
        padding[here] = False
        mask[here] = t.action_mask[1:]
        behavior[here] = np.where(t.action_mask[1:], t.behavior_logprobs[1:], 0.0)
        versions[here] = t.versions[1:]

    packed_params = None
    if layout.packed:
        # Padding at a sequence's end counts as part of it: causal attention keeps it away from real tokens.
        bounds = torch.tensor([start for start, _ in spans] + [width], dtype=torch.int32, device=device)
        longest = max(length for _, length in spans)
        packed_params = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)

    def local(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array)[columns].to(device)

    return MicroBatch(
        tokens=local(tokens),
        targets=local(targets),
        position_ids=local(positions),
        padding=local(padding),
        action_mask=local(mask),
        behavior_logprobs=local(behavior),
        versions=local(versions),
        advantages=torch.tensor(list(advantages) or [0.0], dtype=torch.float32, device=device),
        rewards=torch.tensor([t.reward for t in trajectories] or [0.0], dtype=torch.float32, device=device),
        routes=_routes(trajectories, spans, columns, layout, route_shape, device) if route_shape else None,
        packed_seq_params=packed_params,
        rows=_row_view([len(part) for part in parts], device) if layout.packed else None,
    )


def _place(trajectories: Sequence[Trajectory], layout: BatchLayout) -> list[tuple[int, int]]:
    """Start and padded length of each sequence in the flattened whole micro-batch."""
    lengths = [len(t) - 1 for t in trajectories] or [1]
    # A sequence has two chunks for each context rank, whose part of a row splits over sequence ranks.
    context, sequence = layout.context_size, layout.sequence_size
    chunks, row_multiple = (1, sequence) if context == 1 else (2 * context, context * math.lcm(2, sequence))
    if not layout.packed:
        width = _round_up(max(lengths), row_multiple)
        return [(row * width, width) for row in range(len(lengths))]
    lengths = [_round_up(n, chunks) for n in lengths]
    total = _round_up(sum(lengths), row_multiple)
    lengths[-1] += total - sum(lengths)
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    return list(zip(starts, lengths, strict=True))


def _row_view(lengths: Sequence[int], device: torch.device | str) -> RowView:
    slots = torch.arange(max(lengths))
    valid = slots < torch.tensor(lengths)[:, None]
    index = torch.where(valid, torch.tensor(np.cumsum([0, *lengths[:-1]]))[:, None] + slots, 0)
    return RowView(index.to(device), valid.to(device))


def _routes(
    trajectories: Sequence[Trajectory],
    spans: Sequence[tuple[int, int]],
    columns: torch.Tensor,
    layout: BatchLayout,
    shape: RouteShape,
    device: torch.device | str,
) -> MicroBatchRoutes:
    width = sum(spans[-1])
    experts = padding_routes(width, shape.columns, shape.top_k, shape.num_experts)
    # Padding is forced, a real token without routes is not.
    given = torch.ones(width, dtype=torch.bool)
    counted = torch.zeros(width, dtype=torch.bool)
    for (start, _), t in zip(spans, trajectories, strict=False):
        here = slice(start, start + len(t) - 1)
        if t.routed_experts is None:
            given[here] = False
        else:
            experts[here] = torch.from_numpy(t.routed_experts[:, shape.columns]).to(experts.dtype)
            counted[here] = True
    # Routers see tokens sequence-major, and under sequence parallelism a part of the sequence.
    order = columns.T.reshape(-1)
    size = len(order) // layout.sequence_size
    mine = order[layout.sequence_rank * size : (layout.sequence_rank + 1) * size]
    return MicroBatchRoutes(experts[mine].to(device), given[mine].to(device), counted[mine].to(device))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
