"""SGLang serves the GLM family as transformers computes it, before and after a push of other weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_fr.engines.engine import Engine, EngineSpec
from megatron_fr.hf.folder import read_spec
from megatron_fr.rollout.service import model_limits
from megatron_fr.rollout.session import EngineSession
from megatron_fr.trajectory import ModelLimits, Trajectory
from megatron_fr.weight_sync.publisher import WeightPublisher
from tests.rollout.test_session import connect, finish
from tests.support.transports import make_context, weights
from tools.tiny import make_untrained


@pytest.mark.slow
def test_log_probabilities_and_routes_are_those_of_transformers_also_after_a_push(
    tmp_path: Path, spec: Callable[..., EngineSpec]
) -> None:
    before, after = (
        make_untrained(tmp_path / name, family="glm4_moe", num_layers=3, seed=i) for i, name in enumerate("ab")
    )
    limits = model_limits(read_spec(before), 512)
    assert (limits.num_moe_layers, limits.dense_layers) == (2, (0,))
    engine = Engine(spec(model_path=str(before), max_context=512))

    async def sample() -> list[Trajectory]:
        async with connect(engine, limits, ignore_eos=True) as client:

            async def one(seed: int) -> Trajectory:
                session = EngineSession(client, limits, max_new_tokens=100, want_routes=True)
                session.observe([5, 17, 300, 44, seed])
                await session.generate(stop_token_ids=[])
                return finish(session)

            return list(await asyncio.gather(*(one(seed) for seed in range(8))))

    asyncio.run(engine.start())
    try:
        check(asyncio.run(sample()), limits, before)
        publisher = WeightPublisher(make_context(before, tmp_path, engine.url, timeout_s=60))
        publisher.connect()
        publisher.publish(1, weights(after), weights(after))
        publisher.close()
        check(asyncio.run(sample()), limits, after)
    finally:
        asyncio.run(engine.stop())


def check(trajectories: list[Trajectory], limits: ModelLimits, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chosen: list[np.ndarray] = []
    for layer in model.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda _gate, _inputs, out: chosen.append(np.sort(out[2].numpy())))
    used: set[int] = set()
    for trajectory in trajectories:
        trajectory.validate(limits)
        assert trajectory.num_action_tokens == 100
        tokens, acted = trajectory.tokens.tolist(), trajectory.action_mask[1:]
        chosen.clear()
        with torch.no_grad():
            logprobs = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1).numpy()
        wanted = logprobs[np.arange(len(tokens) - 1), tokens[1:]]
        np.testing.assert_allclose(trajectory.behavior_logprobs[1:][acted], wanted[acted], atol=1e-4)
        assert trajectory.routed_experts is not None
        np.testing.assert_array_equal(np.sort(trajectory.routed_experts), np.stack(chosen, axis=1))
        used |= set(trajectory.routed_experts.flatten().tolist())
    assert used == set(range(8))
