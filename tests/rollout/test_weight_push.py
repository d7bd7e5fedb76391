"""Weights pushed into a real engine: what serves afterwards, and what an engine's success is worth."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from megatron_fr.config.sections import SyncConfig
from megatron_fr.engines.engine import Engine
from megatron_fr.errors import SyncError
from megatron_fr.rollout.session import EngineSession
from megatron_fr.trajectory import ModelLimits, Trajectory
from megatron_fr.weight_sync.broadcast import BroadcastTransport
from megatron_fr.weight_sync.buckets import Bucket
from megatron_fr.weight_sync.publisher import WeightPublisher
from tests.rollout.test_session import PROMPT, check, connect, finish, load_weights, post
from tests.support.hf_reference import forward, next_logprobs
from tests.support.transports import make_context, weights

pytestmark = pytest.mark.slow

#: Makes a connected publisher to the shared engine.
Publisher = Callable[..., WeightPublisher]


class Renaming(BroadcastTransport):
    """Tells the engine other names than the model's: it drops what it does not know, and answers with success."""

    dropped: Callable[[str], bool] = staticmethod(lambda name: False)

    def _send(self, bucket: Bucket, version: int | None) -> None:
        bucket[:] = [(f"strange.{name}" if self.dropped(name) else name, tensor) for name, tensor in bucket]
        super()._send(bucket, version)


@pytest.fixture(scope="module")
def shared_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The example of docs/extending.md, as a module on the path."""
    text = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    folder = tmp_path_factory.mktemp("extending")
    example = text.split("```python\n# shared_file.py")[1].split("```")[0]
    (folder / "shared_file.py").write_text(f"#{example}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


@pytest.fixture
def publisher(
    engine: Engine, limits: ModelLimits, models: list[Path], tmp_path: Path, shared_file: None
) -> Iterator[Publisher]:
    """Afterwards the engine holds the first model again."""
    made: list[WeightPublisher] = []

    def make(**sync: Any) -> WeightPublisher:
        made.append(WeightPublisher(make_context(models[0], tmp_path, engine.url, timeout_s=60, **sync)))
        made[-1].connect()
        return made[-1]

    async def restore() -> None:
        async with connect(engine, limits) as client:
            await load_weights(client, models[0], client.version + 1)

    yield make
    for one in made:
        one.close()
    asyncio.run(restore())


def moved(folder: Path, target: Path) -> Path:
    """The model one step of Adam at the recipes' learning rate later: every weight moved by 1e-6, in a new folder."""
    shutil.copytree(folder, target)
    save_file({name: tensor + 1e-6 for name, tensor in weights(folder)}, target / "model.safetensors", {"format": "pt"})
    return target


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


def version_of(engine: Engine, limits: ModelLimits) -> int:
    async def look() -> int:
        async with connect(engine, limits) as client:
            return client.version

    return asyncio.run(look())


def go_on(engine: Engine, limits: ModelLimits, *, half_way: bool = False) -> None:
    """Release an engine that a push that failed has left paused; ``half_way``: within its tensors."""

    async def release() -> None:
        async with connect(engine, limits) as client:
            if half_way:
                await post(client, "/end_weight_update")
            await post(client, "/continue_generation")

    asyncio.run(release())


def probed(trajectory: Trajectory, model: Path) -> float:
    """What the trainer's probe would measure, were ``model`` the trainer's."""
    tokens = trajectory.tokens.tolist()
    trainer = next_logprobs(forward(model, tokens)[0], tokens[1:])
    acted = trajectory.action_mask[1:]
    difference = np.abs(trajectory.behavior_logprobs[1:][acted] - trainer[acted])[: SyncConfig().probe_tokens]
    return float(difference.mean())


@pytest.mark.parametrize("transport", ["broadcast", "disk", "shared_file:SharedFile"])
def test_an_engine_serves_the_new_model_and_no_old_prefix_is_read(
    engine: Engine, limits: ModelLimits, models: list[Path], publisher: Publisher, tmp_path: Path, transport: str
) -> None:
    check(sample(engine, limits), limits, models[0])  # and its prompt's keys and values are in the prefix cache now
    (tmp_path / "there").symlink_to(tmp_path / "here")
    args = {"trainer_folder": str(tmp_path / "here"), "engine_folder": str(tmp_path / "there")}
    made = publisher(transport=transport, transport_args=args if ":" in transport else {})
    version = version_of(engine, limits) + 1
    started = time.monotonic()
    first = made.publish(version, weights(models[1]), weights(models[1]))
    assert first.num_bytes == sum(tensor.nbytes for _, tensor in weights(models[1])) > 10 * 100_000
    assert 0 < first.verify_s < time.monotonic() - started
    # Also what no push sets, the rotary tables among them, is right after the random weights between the two.
    check(sample(engine, limits, version), limits, models[1])

    later = made.publish(version + 1, weights(models[0]))
    assert later.verify_s == 0  # a single engine has nothing to agree with
    check(sample(engine, limits, version + 1), limits, models[0])

    message = re.escape("the push has 68 tensors, the model 69")
    with pytest.raises(SyncError, match=message):
        made.publish(version + 2, list(weights(models[1]))[:-1])
    assert version_of(engine, limits) == version + 1
    go_on(engine, limits, half_way=transport == "broadcast")
    if transport != "broadcast":  # the engine has not begun to load
        check(sample(engine, limits, version + 1), limits, models[0])


def test_the_first_sync_names_what_the_engine_dropped_where_fresh_tokens_do_not_show_it(
    engine: Engine, limits: ModelLimits, models: list[Path], publisher: Publisher, tmp_path: Path
) -> None:
    after = moved(models[0], tmp_path / "moved")
    made = publisher(transport="tests.rollout.test_weight_push:Renaming")
    version = version_of(engine, limits) + 1

    def dropping(dropped: Callable[[str], bool], pushes: int) -> str:
        Renaming.dropped = staticmethod(dropped)
        try:
            with pytest.raises(SyncError) as raised:
                made.publish(version, *(weights(after) for _ in range(pushes)))
        finally:
            Renaming.dropped = staticmethod(lambda name: False)
        go_on(engine, limits)
        return str(raised.value)

    message = dropping(lambda name: True, 2)
    assert (
        f"version {version} was pushed twice, with random weights between: engine {engine.url} holds other" in message
    )
    assert "in 21 of 21 parameters (model.embed_tokens.weight, " in message
    assert "sync.verify=false" in message

    layer = "model.layers.1."
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
        message = dropping(dropped.__contains__, 2)
        named = re.search(r" in (\d) of 21 parameters \((.*?)\)", message)
        assert named is not None
        assert set(named[2].split(", ")) == {param or tensor for tensor, param in dropped.items()}

    # At a later sync of a single engine, a push of which all is dropped looks like one that arrived: at weights this
    # close the probe does not see it either. Names that the first sync brought are not dropped later.
    made.publish(version, weights(models[0]))
    Renaming.dropped = staticmethod(lambda name: True)
    try:
        made.publish(version + 1, weights(after))
    finally:
        Renaming.dropped = staticmethod(lambda name: False)
    trajectory = sample(engine, limits, version + 1)
    check(trajectory, limits, models[0])
    assert probed(trajectory, after) < SyncConfig().max_probe_difference / 100
    assert probed(trajectory, models[1]) > 2 * SyncConfig().max_probe_difference


def test_an_engine_that_refuses_keeps_its_weights_and_says_why(
    engine: Engine, limits: ModelLimits, models: list[Path], publisher: Publisher
) -> None:
    made = publisher()
    version = version_of(engine, limits)

    async def begin() -> None:
        async with connect(engine, limits) as client:
            await post(client, "/begin_weight_update")

    asyncio.run(begin())
    message = f"engine {engine.url}/begin_weight_update: HTTP 4.*a weight-update session is already open"
    with pytest.raises(SyncError, match=message):
        made.publish(version + 1, weights(models[1]))
    go_on(engine, limits, half_way=True)
    check(sample(engine, limits, version), limits, models[0])
