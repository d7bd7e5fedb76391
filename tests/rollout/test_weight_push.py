"""Weights pushed into a real engine by the publisher: what serves afterwards, and what an engine's success is worth."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
from hf_reference import forward, next_logprobs
from test_session import PROMPT, check, connect, finish, load_weights

from megatron_fr.bridge import hf_tensor_specs, read_hf_config
from megatron_fr.config.sections import SyncConfig
from megatron_fr.rollout.engine import Engine
from megatron_fr.rollout.session import EngineSession
from megatron_fr.sync.publisher import SyncReport, WeightPublisher
from megatron_fr.trajectory import ModelLimits, Trajectory

pytestmark = pytest.mark.slow


def weights(folder: Path) -> Iterable[tuple[str, torch.Tensor]]:
    """In the order of the bridge, in which tensors that the engine loads as one follow each other."""
    tensors = load_file(folder / "model.safetensors")
    for spec in hf_tensor_specs(read_hf_config(folder), torch.float32):
        yield spec.name, tensors[spec.name]


def test_many_buckets_make_the_new_model_and_no_old_prefix_is_read(
    engine: Engine, limits: ModelLimits, models: list[Path]
) -> None:
    async def sample(version: int | None = None) -> Trajectory:
        async with connect(engine, limits) as client:
            if version is not None:
                assert client.version == version
            session = EngineSession(client, limits, max_new_tokens=60, want_routes=True)
            session.observe(PROMPT)
            await session.generate(stop_token_ids=[])
            return finish(session)

    async def restore() -> None:
        async with connect(engine, limits) as client:
            await load_weights(client, models[0], client.version + 1)

    async def current() -> int:
        async with connect(engine, limits) as client:
            return client.version

    async def push(publisher: WeightPublisher, named: Iterable[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        return await asyncio.to_thread(publisher.publish, named, version)

    publisher = WeightPublisher(
        [engine.url],
        engine_world_size=1,
        backend="gloo",
        host="127.0.0.1",
        max_bucket_bytes=100_000,  # q, k and v, and the experts' gate and up, fall into different ones
        timeout_s=60,
    )
    publisher.connect()
    try:
        check(asyncio.run(sample()), limits, models[0])  # and its prompt's keys and values are in the prefix cache now
        version = asyncio.run(current()) + 1
        report = asyncio.run(push(publisher, weights(models[1]), version))
        assert report.num_tensors == len(list(weights(models[1])))
        assert report.num_bytes > 10 * 100_000
        check(asyncio.run(sample(version)), limits, models[1])

        # An engine takes tensors that it has no place for, loads none of them, and answers with success. Nothing in
        # its answers says so; the fresh tokens that are compared after every sync do.
        strange = ((f"strange.{name}", tensor) for name, tensor in weights(models[0]))
        asyncio.run(push(publisher, strange, version + 1))
        trajectory = asyncio.run(sample(version + 1))
        check(trajectory, limits, models[1])
        tokens = trajectory.tokens.tolist()
        trainer = next_logprobs(forward(models[0], tokens)[0], tokens[1:])
        acted = trajectory.action_mask[1:]
        difference = np.abs(trajectory.behavior_logprobs[1:][acted] - trainer[acted])[: SyncConfig().probe_tokens]
        assert difference.mean() > 2 * SyncConfig().max_probe_difference
    finally:
        publisher.close()
        asyncio.run(restore())
