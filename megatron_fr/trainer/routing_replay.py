"""Rollout routing replay (R3): the training forward takes the experts that the engine chose.

Each router has a slot with two cursors over the micro-batches, one for forwards and one for recomputed forwards, which
suits every schedule. Only the selection is forced: router logits and probabilities come from the live weights, so
gradients reach the router. A recomputed forward takes the selection of its forward; ``record`` does only this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay

from megatron_fr.trajectory import route_dtype


@dataclass(frozen=True)
class MicroBatchRoutes:
    """Routes of one micro-batch, in the order in which this rank's routers see its tokens: ``[s, b]`` flattened."""

    experts: torch.Tensor  # device_route_dtype [tokens, this rank's MoE layers, top_k]
    given: torch.Tensor  # bool [tokens], rows whose experts are forced; the others use the live router
    counted: torch.Tensor  # bool [tokens], rows that enter the agreement metric: forced, and not padding


class RoutingReplay:
    """Drives the routers of the rank's model chunks, built with ``moe_enable_routing_replay``.

    Args:
        moe_layers: numbers, from 1, of the whole model's MoE layers in order: the columns of a trajectory's routes.
        recompute: whether every router runs again in the backward.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], moe_layers: Sequence[int], *, recompute: bool) -> None:
        self._recompute = recompute
        self._batches: Sequence[MicroBatchRoutes | None] = ()
        self._slots: list[_Slot] = []
        for router in (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)):
            number = router.layer_number
            if number not in moe_layers:
                raise ValueError(f"router of layer {number} is none of the model's MoE layers {list(moe_layers)}")
            slot = _Slot(self, len(self._slots), number)
            router.router_replay = slot
            router.register_forward_hook(slot.check)
            self._slots.append(slot)
        #: Columns of a trajectory's routes that this rank's routers follow, in their order.
        self.columns = tuple(moe_layers.index(slot.layer_number) for slot in self._slots)
        # Megatron lists every router of the process; a second model must not add to that list.
        RouterReplay.global_router_replay_instances.clear()

    def begin(self, batches: Sequence[MicroBatchRoutes | None]) -> None:
        """Set the routes of the next micro-batches, in schedule order; None means the live router."""
        self._batches = batches
        for slot in self._slots:
            slot.reset()

    def end(self) -> tuple[float, float]:
        """Forget the routes; of how many (token, layer) pairs the live router agrees, and of how many in all.

        Raises:
            RuntimeError: a router did not use the routes of every forward, or sent a token to other experts.
        """
        expected = len(self._batches)
        for slot in self._slots:
            where = f"routing replay of layer {slot.layer_number}"
            backward = expected if self._recompute and slot.trained else 0
            if slot.forward_cursor != expected or slot.recompute_cursor != backward:
                raise RuntimeError(
                    f"{where}: {slot.forward_cursor} of {expected} forwards and {slot.recompute_cursor} of {backward} "
                    "recomputed forwards consumed their routes"
                )
            if bool(slot.strayed):
                raise RuntimeError(f"{where}: {int(slot.strayed)} (token, expert) pairs were not dispatched as given")
        counts = sum(float(s.agreeing) for s in self._slots), sum(float(s.counted) for s in self._slots)
        self.begin(())
        return counts


class _Slot(RouterReplay):
    """Chooses the experts of one router."""

    def __init__(self, owner: RoutingReplay, column: int, layer_number: int) -> None:
        super().__init__()
        self._owner, self._column, self.layer_number = owner, column, layer_number
        self.reset()

    def reset(self) -> None:
        self.forward_cursor = self.recompute_cursor = 0
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
        default_compute_topk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        live_scores, live = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        batches = self._owner._batches
        if not batches:
            return live_scores, live
        recompute = self._owner._recompute
        # Activation checkpointing runs the first forward without gradients, the recomputed one with them.
        if recompute and torch.is_grad_enabled():
            chosen = self.kept.pop(self.recompute_cursor).long()
            self.recompute_cursor += 1
            self.trained = True
        else:
            chosen = self._choose(batches[self.forward_cursor], live)
            if recompute:
                self.kept[self.forward_cursor] = chosen.to(device_route_dtype(scores.shape[1]))
            self.forward_cursor += 1
        self.given = chosen
        return scores.gather(1, chosen), chosen

    @torch.no_grad()
    def _choose(self, routes: MicroBatchRoutes | None, live: torch.Tensor) -> torch.Tensor:
        if routes is None:
            return live
        if len(routes.experts) != len(live):
            rows = f"{len(routes.experts)} rows of routes for {len(live)} tokens"
            raise RuntimeError(f"routing replay of layer {self.layer_number}: {rows}")
        forced = routes.experts[:, self._column].long()
        same = (forced.sort(dim=-1).values == live.sort(dim=-1).values).all(dim=-1)
        self.agreeing = self.agreeing + (same & routes.counted).sum()
        self.counted = self.counted + routes.counted.sum()
        return torch.where(routes.given[:, None], forced, live)

    @torch.no_grad()
    def check(self, _router: torch.nn.Module, _inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        """As a hook after the router: count the given experts that are not in its map."""
        if self.given is not None:
            self.strayed = self.strayed + (~output[1].bool().gather(1, self.given)).sum()
            self.given = None


def device_route_dtype(num_experts: int) -> torch.dtype:
    """Torch dtype as wide as :func:`route_dtype`; torch hardly supports uint16."""
    return torch.uint8 if route_dtype(num_experts).itemsize == 1 else torch.int16


def padding_routes(rows: int, columns: Sequence[int], top_k: int, num_experts: int) -> torch.Tensor:
    """Distinct experts ``[rows, len(columns), top_k]`` for padding, spread evenly, the same in every layout."""
    layers = torch.tensor(columns, dtype=torch.int64)
    first = torch.arange(rows)[:, None, None] * top_k + layers[None, :, None]
    return ((first + torch.arange(top_k)) % num_experts).to(device_route_dtype(num_experts))
