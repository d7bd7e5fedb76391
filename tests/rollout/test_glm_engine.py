"""SGLang serves the GLM family as transformers computes it: dense first layer, sigmoid router, shared expert."""

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
from megatron_fr.rollout.session import EngineSession
from megatron_fr.rollout.setup import model_limits
from megatron_fr.tiny import make_untrained
from megatron_fr.trajectory import Trajectory
from tests.rollout.test_session import connect, finish


@pytest.mark.slow
def test_log_probabilities_and_routes_are_those_of_transformers(
    tmp_path: Path, spec: Callable[..., EngineSpec]
) -> None:
    folder = make_untrained(tmp_path / "glm", family="glm4_moe", num_layers=3)
    limits = model_limits(read_spec(folder), 512)
    assert (limits.num_moe_layers, limits.dense_layers) == (2, (0,))

    async def run() -> list[Trajectory]:
        server = Engine(spec(model_path=str(folder), max_context=512))
        await server.start()
        try:
            async with connect(server, limits, ignore_eos=True) as client:

                async def one(seed: int) -> Trajectory:
                    session = EngineSession(client, limits, max_new_tokens=100, want_routes=True)
                    session.observe([5, 17, 300, 44, seed])
                    await session.generate(stop_token_ids=[])
                    return finish(session)

                return list(await asyncio.gather(*(one(seed) for seed in range(8))))
        finally:
            await server.stop()

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chosen: list[np.ndarray] = []
    for layer in model.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda _gate, _inputs, out: chosen.append(np.sort(out[2].numpy())))
    used: set[int] = set()
    for trajectory in asyncio.run(run()):
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
