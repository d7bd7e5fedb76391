"""Faults of routing replay that users of such systems report, each against Megatron-Core's own router."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch.utils.checkpoint import checkpoint

from megatron_fr.config import ParallelConfig
from megatron_fr.models.registry import model_spec
from megatron_fr.runtime.device import prepare_process, resolve_device
from megatron_fr.trainer.model import build_transformer_config
from megatron_fr.trainer.routing_replay import MicroBatchRoutes, RoutingReplay
from tools.tiny.model import tiny_config

DEVICE = resolve_device("cpu")
prepare_process(DEVICE)

LAYERS, TOKENS = 2, 12


@pytest.fixture(autouse=True)
def _routers_stay_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Megatron-Core router moves its weight to the current CUDA device."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


class Routers(torch.nn.Module):
    """Megatron-Core routers one after the other; the probabilities of one change the input of the next.

    ``maps`` keeps each call's routing map, layer by layer: bool ``[tokens, experts]``.
    """

    def __init__(self, *, recompute: bool, seed: int = 0) -> None:
        super().__init__()
        spec = model_spec(tiny_config("qwen3_moe"))
        config = build_transformer_config(spec, ParallelConfig(), DEVICE, dtype=torch.float32, routing_replay=True)
        groups: Any = SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)
        generator = torch.Generator().manual_seed(seed)
        self.hidden, self.experts, self.top_k = config.hidden_size, config.num_moe_experts, config.moe_router_topk
        self.mix = torch.randn(self.experts, self.hidden, generator=generator)
        self.recompute = recompute
        self.maps: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]
        self.routers = torch.nn.ModuleList()
        for layer in range(LAYERS):
            router = TopKRouter(config, groups)
            router.weight.data = torch.randn(self.experts, self.hidden, generator=generator)
            router.set_layer_number(layer + 1)
            self.routers.append(router)

    def _layer(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        probs, routing_map = self.routers[layer](hidden)
        self.maps[layer].append(routing_map.detach().clone())
        return hidden + (probs @ self.mix)[:, None]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in range(LAYERS):
            if self.recompute:
                hidden = checkpoint(self._layer, layer, hidden, use_reentrant=True)
            else:
                hidden = self._layer(layer, hidden)
        return hidden

    def gradients(self) -> list[torch.Tensor]:
        return [router.weight.grad.clone() for router in self.routers]


def inputs(model: Routers, seed: int) -> torch.Tensor:
    values = torch.randn(TOKENS, 1, model.hidden, generator=torch.Generator().manual_seed(seed))
    return values.requires_grad_()


def random_routes(model: Routers, seed: int) -> MicroBatchRoutes:
    scores = torch.rand(TOKENS, LAYERS, model.experts, generator=torch.Generator().manual_seed(seed))
    every = torch.ones(TOKENS, dtype=torch.bool)
    return MicroBatchRoutes(scores.argsort(-1)[..., : model.top_k], every, every)


def as_map(model: Routers, routes: MicroBatchRoutes, layer: int) -> torch.Tensor:
    return torch.zeros(TOKENS, model.experts, dtype=torch.bool).scatter(1, routes.experts[:, layer], True)


def train(model: Routers, order: str, routes: list[MicroBatchRoutes], *, drift: float = 0.0) -> list[torch.Tensor]:
    """Run ``order``, such as ``F0 F1 B0 B1``; the live router may drift before the first backward."""
    replay = RoutingReplay([model], [1, 2], recompute=model.recompute)
    replay.begin(routes)
    outputs: dict[str, torch.Tensor] = {}
    for step in order.split():
        if step[0] == "F":
            outputs[step[1:]] = model(inputs(model, int(step[1:])))
        else:
            if drift and len(outputs) == len(routes):
                for router in model.routers:
                    router.weight.data.mul_(-drift)
            outputs.pop(step[1:]).square().sum().backward()
    replay.end()
    return model.gradients()


def test_the_experts_used_are_the_experts_given() -> None:
    model = Routers(recompute=False)
    routes = [random_routes(model, seed) for seed in (0, 1)]
    train(model, "F0 F1 B0 B1", routes)
    for layer in range(LAYERS):
        for used, given in zip(model.maps[layer], routes, strict=True):
            assert torch.equal(used, as_map(model, given, layer))
    # And these are not what the live router takes.
    live = Routers(recompute=False)
    for router in live.routers:
        router.router_replay = None
    live(inputs(live, 0))
    assert not torch.equal(live.maps[0][0], model.maps[0][0])


def test_rows_without_routes_take_the_live_router() -> None:
    model, live = Routers(recompute=False), Routers(recompute=False)
    for router in live.routers:
        router.router_replay = None
    routes = random_routes(model, 0)
    given = torch.arange(TOKENS) < 5
    replay = RoutingReplay([model], [1, 2], recompute=False)
    replay.begin([MicroBatchRoutes(routes.experts, given, given)])
    model(inputs(model, 0))
    agreeing, counted = replay.end()
    live(inputs(live, 0))
    assert torch.equal(model.maps[0][0][:5], as_map(model, routes, 0)[:5])
    assert torch.equal(model.maps[0][0][5:], live.maps[0][0][5:])
    assert counted == 5 * LAYERS
    assert agreeing < counted


def test_a_router_that_dispatches_elsewhere_than_given_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Routers(recompute=False)
    replay = RoutingReplay([model], [1, 2], recompute=False)
    routing = model.routers[1].routing

    def astray(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        probs, routing_map = routing(*args, **kwargs)
        return probs, torch.cat([~routing_map[:1], routing_map[1:]])

    monkeypatch.setattr(model.routers[1], "routing", astray)
    replay.begin([random_routes(model, 0)])
    model(inputs(model, 0))
    message = rf"layer 2: {model.top_k} \(token, expert\) pairs were not dispatched as given"
    with pytest.raises(RuntimeError, match=message):
        replay.end()


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("F0", "1 of 2 forwards"),
        ("F0 F1 B1", "2 of 2 forwards and 1 of 2 recomputed forwards"),
    ],
)
def test_routes_that_were_not_all_consumed_raise(order: str, message: str) -> None:
    model = Routers(recompute=True)
    with pytest.raises(RuntimeError, match=message):
        train(model, order, [random_routes(model, seed) for seed in (0, 1)])


def test_routes_of_another_number_of_tokens_raise() -> None:
    model = Routers(recompute=False)
    routes = random_routes(model, 0)
    replay = RoutingReplay([model], [1, 2], recompute=False)
    replay.begin([MicroBatchRoutes(routes.experts[1:], routes.given[1:], routes.counted[1:])])
    with pytest.raises(RuntimeError, match=f"layer 1: {TOKENS - 1} rows of routes for {TOKENS} tokens"):
        model(inputs(model, 0))


@pytest.mark.parametrize("order", ["F0 B0 F1 B1 F2 B2", "F0 F1 B0 F2 B1 B2", "F0 F1 F2 B0 B1 B2"])
def test_recomputed_forwards_follow_a_cursor_of_their_own(order: str) -> None:
    routes = [random_routes(Routers(recompute=False), seed) for seed in (0, 1, 2)]
    plain, recomputed = Routers(recompute=False), Routers(recompute=True)
    wanted, found = train(plain, order, routes), train(recomputed, order, routes)
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    # Each micro-batch's map was seen twice, first by its forward and then by its recomputed one.
    for layer in range(LAYERS):
        calls = torch.stack(recomputed.maps[layer])
        for given in routes:
            assert int((calls == as_map(plain, given, layer)).all(dim=(1, 2)).sum()) == 2


def test_a_live_router_decides_once_whatever_happens_before_the_recomputed_forward() -> None:
    model = Routers(recompute=True)
    nothing = torch.zeros(TOKENS, dtype=torch.bool)
    experts = random_routes(model, 0).experts
    live = [MicroBatchRoutes(experts, nothing, nothing)] * 2
    # Negated weights turn every choice around; without what was kept the recomputed maps would be others.
    train(model, "F0 F1 B0 B1", live, drift=1.0)
    for layer in range(LAYERS):
        first, second, first_again, second_again = model.maps[layer]
        assert torch.equal(first, first_again)
        assert torch.equal(second, second_again)
        assert not torch.equal(first, second)


def test_a_second_model_in_the_process_changes_nothing() -> None:
    alone = Routers(recompute=True)
    routes = [random_routes(alone, seed) for seed in (0, 1)]
    wanted = train(alone, "F0 F1 B0 B1", routes)

    before, model = Routers(recompute=False, seed=5), Routers(recompute=True)
    replay = RoutingReplay([model], [1, 2], recompute=True)
    after = Routers(recompute=False, seed=6)
    assert replay.columns == (0, 1)
    assert not any(slot in RouterReplay.global_router_replay_instances for slot in replay._slots)
    replay.begin(routes)
    outputs = []
    for index in (0, 1):
        for other in (before, after):
            other(inputs(other, index))
        outputs.append(model(inputs(model, index)))
    for output in outputs:
        output.square().sum().backward()
    replay.end()
    for a, b in zip(wanted, model.gradients(), strict=True):
        assert torch.equal(a, b)
    for layer in range(LAYERS):
        assert torch.equal(model.maps[layer][0], as_map(model, routes[0], layer))
        assert not torch.equal(before.maps[layer][0], as_map(model, routes[0], layer))


def test_a_drifted_replay_still_teaches_the_router() -> None:
    model = Routers(recompute=False)
    routes = random_routes(model, 0)
    hidden = inputs(model, 0)
    replay = RoutingReplay([model], [1, 2], recompute=False)
    replay.begin([routes])
    router: Any = model.routers[0]
    probs, _ = router(hidden)
    weights = torch.randn(probs.shape, generator=torch.Generator().manual_seed(2))
    (probs * weights).sum().backward()
    replay.begin([])
    # By hand: the live logits of the given experts, then their softmax.
    leaf = router.weight.detach().clone().requires_grad_()
    chosen = (hidden.detach()[:, 0] @ leaf.T).gather(1, routes.experts[:, 0]).softmax(-1)
    (chosen * weights.gather(1, routes.experts[:, 0])).sum().backward()
    assert int((probs > 0).sum()) == TOKENS * model.top_k
    torch.testing.assert_close(router.weight.grad, leaf.grad, rtol=1e-4, atol=1e-5)
    assert float(router.weight.grad.norm()) > 1e-2
