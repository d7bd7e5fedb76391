"""Weights pushed into a real engine by the publisher: what serves afterwards, and what an engine's success is worth."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_fr.config.sections import SyncConfig
from megatron_fr.engines.engine import Engine
from megatron_fr.errors import SyncError
from megatron_fr.hf.export import hf_tensor_specs
from megatron_fr.hf.folder import read_hf_config
from megatron_fr.rollout.session import EngineSession
from megatron_fr.trajectory import ModelLimits, Trajectory
from megatron_fr.weight_sync.buckets import Bucket
from megatron_fr.weight_sync.engine_layout import engine_layout
from megatron_fr.weight_sync.publisher import SyncReport, WeightPublisher
from tests.rollout.test_session import PROMPT, check, connect, finish, load_weights, post
from tests.support.hf_reference import forward, next_logprobs

pytestmark = pytest.mark.slow

Named = Iterable[tuple[str, torch.Tensor]]


class Renaming(WeightPublisher):
    """Tells the engine other names than the model's: it drops what it does not know, and answers with success."""

    rename: Callable[[str], str] = staticmethod(lambda name: name)

    def _send(self, bucket: Bucket, version: int | None) -> None:
        bucket.names = [self.rename(name) for name in bucket.names]
        super()._send(bucket, version)


def weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """In the order of the bridge, in which tensors that the engine loads as one follow each other."""
    tensors = load_file(folder / "model.safetensors")
    for spec in hf_tensor_specs(read_hf_config(folder), torch.float32):
        yield spec.name, tensors[spec.name]


def moved(folder: Path, target: Path) -> Path:
    """The model one step of Adam at the recipes' learning rate later: every weight moved by 1e-6, in a new folder."""
    shutil.copytree(folder, target)
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: tensor + 1e-6 * torch.randn(tensor.shape, generator=generator).sign() for name, tensor in weights(folder)
    }
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture(scope="module")
def publisher(engine: Engine, models: list[Path], limits: ModelLimits) -> Iterator[Renaming]:
    """Connected; afterwards the engine holds the first model again."""

    async def restore() -> None:
        async with connect(engine, limits) as client:
            await load_weights(client, models[0], client.version + 1)

    made = Renaming(
        [engine.url],
        layout=engine_layout(read_hf_config(models[0]), "cpu"),
        verify=True,
        dtype="float32",
        engine_world_size=1,
        backend="gloo",
        host="127.0.0.1",
        max_bucket_bytes=100_000,  # q, k and v, and the experts' gate and up, fall into different ones
        timeout_s=60,
    )
    made.connect()
    yield made
    made.close()
    asyncio.run(restore())


def sample(engine: Engine, limits: ModelLimits, version: int | None = None) -> Trajectory:
    async def generate() -> Trajectory:
        async with connect(engine, limits) as client:
            if version is not None:
                assert client.version == version
            session = EngineSession(client, limits, max_new_tokens=60, want_routes=True)
            session.observe(PROMPT)
            await session.generate(stop_token_ids=[])
            return finish(session)

    return asyncio.run(generate())


def version_of(engine: Engine, limits: ModelLimits, *, after: str | None = None) -> int:
    """The version that the engine says it holds; with ``after``, of a push that failed and left it paused.

    ``after`` says how far it came: ``half-way`` or ``compared``.
    """

    async def look() -> int:
        async with connect(engine, limits) as client:
            if after == "half-way":
                await post(client, "/end_weight_update")
            if after is not None:
                await post(client, "/continue_generation")
            return client.version

    return asyncio.run(look())


def push_dropping(publisher: Renaming, named: Named, version: int, dropped: Callable[[str], bool]) -> str:
    """A push of which the engine drops some tensors; returns the error."""
    publisher.rename = lambda name: f"strange.{name}" if dropped(name) else name
    with pytest.raises(SyncError) as raised:
        publisher.publish(named, version)
    publisher.rename = lambda name: name
    return str(raised.value)


def probed(trajectory: Trajectory, model: Path) -> float:
    """What the trainer's probe would measure, were ``model`` the trainer's."""
    tokens = trajectory.tokens.tolist()
    trainer = next_logprobs(forward(model, tokens)[0], tokens[1:])
    acted = trajectory.action_mask[1:]
    difference = np.abs(trajectory.behavior_logprobs[1:][acted] - trainer[acted])[: SyncConfig().probe_tokens]
    return float(difference.mean())


def test_many_buckets_make_the_new_model_and_no_old_prefix_is_read(
    engine: Engine, limits: ModelLimits, models: list[Path], publisher: Renaming
) -> None:
    check(sample(engine, limits), limits, models[0])  # and its prompt's keys and values are in the prefix cache now
    version = version_of(engine, limits) + 1
    report: SyncReport = publisher.publish(weights(models[1]), version)
    assert report.num_tensors == len(list(weights(models[1])))
    assert report.num_bytes > 10 * 100_000
    assert 0 < report.verify_s < report.seconds
    check(sample(engine, limits, version), limits, models[1])

    # An engine takes tensors that it has no place for, loads none of them, and answers with success. Nothing in its
    # answers says so; its checksums do, and the fresh tokens that are compared after every sync, here.
    message = push_dropping(publisher, weights(models[0]), version + 1, lambda name: True)
    assert "parameters are not what was sent" in message
    assert version_of(engine, limits, after="compared") == version + 1
    trajectory = sample(engine, limits, version + 1)
    check(trajectory, limits, models[1])
    assert probed(trajectory, models[0]) > 2 * SyncConfig().max_probe_difference


def test_what_the_engine_dropped_is_named_where_fresh_tokens_do_not_show_it(
    engine: Engine, limits: ModelLimits, models: list[Path], publisher: Renaming, tmp_path: Path
) -> None:
    after = moved(models[0], tmp_path / "moved")
    version = version_of(engine, limits) + 1
    publisher.publish(weights(models[0]), version)

    message = push_dropping(publisher, weights(after), version, lambda name: True)  # as it would at every sync
    names = {stored.param for stored in engine_layout(read_hf_config(after), "cpu").values()}
    assert f"after the push of version {version}, engine {engine.url} does not hold it: " in message
    assert f"{len(names)} of {len(names)} parameters are not what was sent" in message
    assert "sync.verify=false" in message
    version_of(engine, limits, after="compared")
    assert probed(sample(engine, limits, version), after) < SyncConfig().max_probe_difference / 100

    # Each push brings what the one before it dropped, so that only its own is missing.
    layer, target = "model.layers.1.", after
    for dropped in (
        {"model.embed_tokens.weight": "", f"{layer}self_attn.k_proj.weight": f"{layer}self_attn.qkv_proj.weight"},
        {f"{layer}self_attn.q_norm.weight": "", f"{layer}self_attn.o_proj.weight": "", f"{layer}mlp.gate.weight": ""},
        {
            f"{layer}mlp.experts.5.up_proj.weight": f"{layer}mlp.experts.w13_weight",
            f"{layer}mlp.experts.7.down_proj.weight": f"{layer}mlp.experts.w2_weight",
            "lm_head.weight": "",
        },
        {"model.norm.weight": ""},
    ):
        message = push_dropping(publisher, weights(target), version, dropped.__contains__)
        version_of(engine, limits, after="compared")
        assert f"{len(dropped)} of {len(names)} parameters are not what was sent: " in message
        for tensor, param in dropped.items():
            assert f"{param or tensor} (other bytes, of " in message
        target = models[0] if target == after else after


def test_a_push_that_lacks_a_tensor_does_not_bring_the_engine_to_its_version(
    engine: Engine, limits: ModelLimits, models: list[Path], publisher: Renaming
) -> None:
    version = version_of(engine, limits)
    with pytest.raises(SyncError, match=re.escape("the push has 68 tensors, the model 69")):
        publisher.publish(list(weights(models[0]))[:-1], version + 1)
    assert version_of(engine, limits, after="half-way") == version
