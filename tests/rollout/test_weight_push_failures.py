"""Pushes to two real engines: they must agree, and one that stops or dies on the way ends the push with its name."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from megatron_fr.engines.engine import Engine, EngineSpec
from megatron_fr.errors import SyncError
from megatron_fr.trajectory import ModelLimits
from megatron_fr.weight_sync.publisher import WeightPublisher
from tests.rollout.test_session import check, connect, load_weights, post
from tests.rollout.test_weight_push import go_on, sample, version_of
from tests.support.processes import family_of
from tests.support.transports import make_context, weights

pytestmark = pytest.mark.slow

Named = Iterator[tuple[str, torch.Tensor]]
TIMEOUT_S = 8


@pytest.fixture(scope="module")
def second(spec: Callable[..., EngineSpec]) -> Iterator[Engine]:
    """An engine that the tests of this module may stop and kill, in their order."""
    server = Engine(spec())
    asyncio.run(server.start())
    yield server
    send(server, signal.SIGCONT)
    asyncio.run(server.stop())


def send(engine: Engine, number: signal.Signals) -> None:
    if engine.death() is None:
        for process in family_of(engine.pid):
            os.kill(process.pid, number)


def then(named: Named, count: int, action: Callable[[], None]) -> Named:
    """The same tensors; the action comes after ``count`` of them."""
    for i, item in enumerate(named):
        if i == count:
            action()
        yield item


def put_back(engine: Engine, limits: ModelLimits, model: Path) -> None:
    async def load() -> None:
        async with connect(engine, limits) as client:
            await load_weights(client, model, client.version + 1)

    asyncio.run(load())


@pytest.fixture
def publisher(tmp_path: Path, models: list[Path]) -> Iterator[Callable[..., WeightPublisher]]:
    made: list[WeightPublisher] = []

    def make(*engines: Engine, transport: str = "broadcast") -> WeightPublisher:
        urls = [engine.url for engine in engines]
        made.append(WeightPublisher(make_context(models[0], tmp_path, *urls, transport=transport, timeout_s=TIMEOUT_S)))
        made[-1].connect()
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_engines_that_hold_different_weights_end_the_push(
    engine: Engine, second: Engine, limits: ModelLimits, models: list[Path], publisher: Callable[..., WeightPublisher]
) -> None:
    made = publisher(engine, second)
    version = version_of(engine, limits) + 1
    report = made.publish(version, weights(models[1]), weights(models[1]))
    assert report.verify_s > 0
    for one in (engine, second):
        check(sample(one, limits, version), limits, models[1])
    assert made.publish(version + 1, weights(models[1])).verify_s > 0

    # The second engine alone takes what its own process overwrites meanwhile: as a bucket that was lost on the way.
    async def overwrite() -> None:
        async with connect(second, limits) as client:
            await post(client, "/weights_checker", action="reset_tensors", skip_tensor_list=["layers", "norm"])

    named = list(weights(models[0]))
    with pytest.raises(SyncError) as raised:
        made.publish(version + 2, then(iter(named), len(named) - 1, lambda: asyncio.run(overwrite())))
    message = str(raised.value)
    assert f"after the push of version {version + 2}, engines {engine.url} and {second.url} differ in 1 of 21 para" in (
        message
    )
    assert "(model.embed_tokens.weight)" in message
    for one in (engine, second):
        go_on(one, limits)
        put_back(one, limits, models[0])


def test_an_engine_that_stops_while_a_version_is_written_ends_the_push_and_has_the_old_or_the_new_one(
    engine: Engine, second: Engine, limits: ModelLimits, models: list[Path], publisher: Callable[..., WeightPublisher]
) -> None:
    made = publisher(second, transport="disk")
    version = version_of(second, limits)
    started = time.monotonic()
    stop = lambda: send(second, signal.SIGSTOP)  # noqa: E731
    with pytest.raises(SyncError, match=f"{second.url}/update_weights_from_disk: no answer within sync.timeout_s"):
        made.publish(version + 1, then(weights(models[1]), 5, stop))
    assert time.monotonic() - started < TIMEOUT_S + 10
    send(second, signal.SIGCONT)
    deadline = time.monotonic() + 10
    while version_of(second, limits) == version and time.monotonic() < deadline:
        time.sleep(0.2)  # the request may have been taken; it is carried out now
    held = version_of(second, limits)
    go_on(second, limits)
    check(sample(second, limits, held), limits, models[held - version])
    put_back(second, limits, models[0])


def test_an_engine_that_stops_in_the_middle_of_a_broadcast_ends_the_push_and_keeps_its_version(
    engine: Engine, second: Engine, limits: ModelLimits, models: list[Path], publisher: Callable[..., WeightPublisher]
) -> None:
    made = publisher(second)
    version = version_of(second, limits)
    started = time.monotonic()
    stop = lambda: send(second, signal.SIGSTOP)  # noqa: E731
    with pytest.raises(SyncError, match=f"engine {second.url}/update_weights_from_distributed: no answer within"):
        made.publish(version + 1, then(weights(models[1]), 40, stop))
    assert time.monotonic() - started < TIMEOUT_S + 10
    send(second, signal.SIGCONT)
    assert version_of(second, limits) == version


def test_an_engine_that_dies_in_the_middle_of_a_broadcast_ends_the_push_at_once(
    engine: Engine, second: Engine, limits: ModelLimits, models: list[Path], publisher: Callable[..., WeightPublisher]
) -> None:
    asyncio.run(second.stop())
    asyncio.run(second.start())
    made = publisher(engine, second)
    version = version_of(engine, limits)
    started = time.monotonic()

    def kill() -> None:
        for process in family_of(second.pid):
            process.kill()
        psutil.wait_procs(family_of(second.pid) if psutil.pid_exists(second.pid or 0) else [], timeout=5)

    with pytest.raises(SyncError, match=f"engine {second.url}/update_weights_from_distributed: the connection broke"):
        made.publish(version + 1, then(weights(models[1]), 40, kill))
    assert time.monotonic() - started < TIMEOUT_S
    # The other engine keeps the version before. It may wait for the rest of the broadcast, so the run ends here.
    assert version_of(engine, limits) == version
