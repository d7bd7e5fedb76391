"""Rollout routing replay (R3): the experts that the engine chose are forced in the training forward.

Megatron-Core's ``RouterReplay`` asks one object per MoE layer for the selected experts. Its own bookkeeping is a
process-global list and a flag that has to be switched around every micro-batch; here each router of *this* model gets a
slot that follows two cursors over the batch's micro-batches, one for forwards and one for recomputed forwards, so that
activation recompute and pipeline schedules (which run forwards ahead of backwards) need no switching.

Only the selection is forced. Router logits and their probabilities are computed from the live weights, so gradients
reach the router. What a forward selected, forced or live, is kept for its recomputed forward: both take the same
experts, whatever rounding does to the live router. With that alone (``record``) nothing is forced in the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay

from megatron_fr.trajectory import route_dtype


@dataclass(frozen=True)
class MicroBatchRoutes:
    """The routes of one micro-batch, in the order in which this rank's routers see its tokens.

    Attributes:
        experts: :func:`device_route_dtype` ``[tokens, this rank's MoE layers, top_k]``, sequence-major (``[s, b]``
            flattened), this rank's sequence-parallel slice.
        given: bool ``[tokens]``: rows whose experts are forced. The others use the live router.
        counted: bool ``[tokens]``: rows that enter the agreement metric (forced and not padding).
    """

    experts: torch.Tensor
    given: torch.Tensor
    counted: torch.Tensor


class RoutingReplay:
    """Drives the routers of one model.

    Args:
        chunks: the rank's model chunks, built with ``moe_enable_routing_replay``.
        moe_layers: global (1-based) layer numbers of all MoE layers of the whole model, ascending: the columns of a
            trajectory's routes.
        recompute: whether activations are recomputed, in which case every router runs again during the backward.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], moe_layers: Sequence[int], *, recompute: bool) -> None:
        columns = {number: column for column, number in enumerate(moe_layers)}
        self._recompute = recompute
        self._batches: list[MicroBatchRoutes | None] = []
        self._slots: list[_Slot] = []
        self._columns: list[int] = []
        for chunk in chunks:
            for router in (m for m in chunk.modules() if isinstance(m, TopKRouter)):
                number = router.layer_number
                if number not in columns:
                    raise ValueError(f"router of layer {number} is none of the model's MoE layers {list(moe_layers)}")
                slot = _Slot(self, len(self._slots))
                router.router_replay = slot
                self._columns.append(columns[number])
                slot.layer_number = number
                router.register_forward_hook(slot.check)
                self._slots.append(slot)
        # Megatron registers every router ever built in the process; a second model would pollute that list.
        RouterReplay.global_router_replay_instances.clear()
        self.end()

    @property
    def num_routers(self) -> int:
        """How many routers of this rank follow the replay."""
        return len(self._slots)

    @property
    def columns(self) -> tuple[int, ...]:
        """Which columns of a trajectory's routes are this rank's, in the order of :class:`MicroBatchRoutes`."""
        return tuple(self._columns)

    def begin(self, batches: Sequence[MicroBatchRoutes | None]) -> None:
        """Give the routes of the next forward-backward's micro-batches, in schedule order; None: the live router's."""
        self._batches = list(batches)
        for slot in self._slots:
            slot.reset()

    def end(self) -> tuple[float, float]:
        """Forget the routes; live routing applies again until the next :meth:`begin`.

        Returns:
            ``(agreeing, counted)`` (token, layer) pairs of this rank: how often the live router would have chosen the
            same set of experts.

        Raises:
            RuntimeError: a router did not consume every micro-batch, forward or recomputed, or sent a token to other
                experts than it was given.
        """
        expected = len(self._batches)
        for slot in self._slots:
            backward = expected if self._recompute and slot.trained else 0
            if slot.forward_cursor != expected or slot.recompute_cursor != backward:
                raise RuntimeError(
                    f"routing replay of layer {slot.layer_number}: {slot.forward_cursor} of {expected} forwards and "
                    f"{slot.recompute_cursor} of {backward} recomputed forwards consumed their routes"
                )
            if bool(slot.strayed):
                raise RuntimeError(
                    f"routing replay of layer {slot.layer_number}: {int(slot.strayed)} (token, expert) pairs were not "
                    "dispatched as given"
                )
        agreeing = sum(float(s.agreeing) for s in self._slots)
        counted = sum(float(s.counted) for s in self._slots)
        self._batches = []
        for slot in self._slots:
            slot.reset()
        return agreeing, counted

    def abandon(self) -> None:
        """Forget the routes after a failed step, without the check that all were consumed."""
        self._batches = []
        for slot in self._slots:
            slot.reset()


class _Slot(RouterReplay):
    """What one router asks for its experts."""

    def __init__(self, owner: RoutingReplay, column: int) -> None:
        super().__init__()
        self._owner = owner
        self._column = column
        self.reset()

    def reset(self) -> None:
        self.forward_cursor = 0
        self.recompute_cursor = 0
        self.trained = False
        self.agreeing: torch.Tensor | float = 0.0
        self.counted: torch.Tensor | float = 0.0
        self.strayed: torch.Tensor | int = 0
        self.kept: dict[int, torch.Tensor] = {}
        self.given: torch.Tensor | None = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert default_compute_topk is not None
        live_scores, live = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        batches = self._owner._batches
        if not batches:
            return live_scores, live
        # Checkpointing runs the first forward without gradients and the recomputed one with them.
        if self._owner._recompute and torch.is_grad_enabled():
            chosen = self.kept.pop(self.recompute_cursor).long()
            self.recompute_cursor += 1
            self.trained = True
        else:
            chosen = self._choose(batches[self.forward_cursor], live)
            if self._owner._recompute:
                self.kept[self.forward_cursor] = chosen.to(device_route_dtype(scores.shape[1]))
            self.forward_cursor += 1
        self.given = chosen
        return scores.gather(1, chosen), chosen

    @torch.no_grad()
    def _choose(self, routes: MicroBatchRoutes | None, live: torch.Tensor) -> torch.Tensor:
        if routes is None:
            return live
        if len(routes.experts) != len(live):
            raise RuntimeError(
                f"routing replay of layer {self.layer_number}: {len(routes.experts)} rows of routes for "
                f"{len(live)} tokens"
            )
        forced = routes.experts[:, self._column].long()
        same = (forced.sort(dim=-1).values == live.sort(dim=-1).values).all(dim=-1)
        self.agreeing = self.agreeing + (same & routes.counted).sum()
        self.counted = self.counted + routes.counted.sum()
        return torch.where(routes.given[:, None], forced, live)

    @torch.no_grad()
    def check(self, router: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        """A hook after the router: count the given experts that its routing map does not have."""
        del router, inputs
        if self.given is not None:
            self.strayed = self.strayed + (~output[1].bool().gather(1, self.given)).sum()
            self.given = None


def device_route_dtype(num_experts: int) -> torch.dtype:
    """As wide as :func:`megatron_fr.trajectory.route_dtype`; torch can do little with uint16."""
    return torch.uint8 if route_dtype(num_experts).itemsize == 1 else torch.int16


def padding_routes(rows: int, columns: Sequence[int], top_k: int, num_experts: int) -> torch.Tensor:
    """Valid, distinct experts for padding rows, spread so that no expert is overloaded.

    Args:
        columns: of the whole model's routes, so that the same rows get the same experts in every layout.

    Returns:
        :func:`device_route_dtype` ``[rows, len(columns), top_k]``.
    """
    layers = torch.tensor(columns, dtype=torch.int64)
    first = torch.arange(rows)[:, None, None] * top_k + layers[None, :, None]
    return ((first + torch.arange(top_k)[None, None, :]) % num_experts).to(device_route_dtype(num_experts))
