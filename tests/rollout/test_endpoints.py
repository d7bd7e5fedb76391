"""Endpoints over real HTTP, on the real queue, gate and pool; engines and episodes answer on command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from megatron_fr.agents.contract import Prompt
from megatron_fr.errors import RolloutEnded
from megatron_fr.rollout.endpoints import Endpoints
from megatron_fr.rollout.probe import ProbeSampler
from megatron_fr.rollout.watchdog import EventLoopDelay
from megatron_fr.runtime.access import bearer
from megatron_fr.trajectory import decode
from tests.rollout.test_misbehaving_engine import LIMITS, answer, engine
from tests.rollout.test_runner import Bench


@asynccontextmanager
async def serve(
    failure: asyncio.Future[Any], fleet: Any, rollouts: Any = None, probe: Any = None
) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    """Endpoints of what a test needs."""
    endpoints = Endpoints(fleet, rollouts, probe, evaluate=None, event_loop_delay=EventLoopDelay(), failure=failure)
    server = endpoints.runner("token")
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession(headers=bearer("token")) as http:
            yield f"http://127.0.0.1:{server.addresses[0][1]}", http
    finally:
        await server.cleanup()


def test_a_trajectory_that_arrives_right_after_a_look_at_the_queue_is_not_waited_past() -> None:
    async def run() -> None:
        arrival = asyncio.Event()

        async def script(*_: str) -> None:
            await arrival.wait()

        bench = Bench(script, batch=1, runners=1)
        plain_lease = bench.queue.lease

        def lease(version: int) -> Any:
            batch = plain_lease(version)
            if batch is None:
                arrival.set()  # the runner goes on before anything that is scheduled from here on
            return batch

        bench.queue.lease = lease  # type: ignore[method-assign]
        bench.pool.start()
        await asyncio.sleep(0)
        failure = asyncio.get_running_loop().create_future()
        fleet = SimpleNamespace(tokens_generated=0)
        async with (
            serve(failure, fleet, rollouts=bench) as (url, http),
            asyncio.timeout(5),
            http.post(url + "/lease", json={"version": 0, "wait_s": 60}) as response,
        ):
            assert response.status == 200
            assert [item["id"] for item in (await response.json())["items"]] == ["000000"]
        await bench.pool.stop()

    asyncio.run(run())


def test_a_client_that_hangs_up_leaves_the_lease_to_others() -> None:
    async def run() -> None:
        bench = Bench(lambda *_: asyncio.sleep(60), batch=1, runners=1)
        bench.pool.start()
        failure = asyncio.get_running_loop().create_future()
        async with serve(failure, SimpleNamespace(tokens_generated=0), rollouts=bench) as (url, http):
            given_up = aiohttp.ClientTimeout(total=0.3)
            with pytest.raises(TimeoutError):
                await http.post(url + "/lease", json={"version": 0, "wait_s": 60}, timeout=given_up)
            async with asyncio.timeout(5), http.post(url + "/lease", json={"version": 0, "wait_s": 0.1}) as answer:
                assert answer.status == 204
        await bench.pool.stop()

    asyncio.run(run())


@pytest.mark.parametrize("shown", [b"", b"Bearer", b"Bearer other", b"Bearer \xff", "Bearer tok\u00e9n".encode()])
def test_whatever_is_shown_instead_of_the_token_is_refused(shown: bytes) -> None:
    async def run() -> bytes:
        failure = asyncio.get_running_loop().create_future()
        async with serve(failure, SimpleNamespace()) as (url, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(
                b"GET /status HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: " + shown + b"\r\n\r\n"
            )
            answer = await reader.read()
            writer.close()
            return answer

    assert asyncio.run(run()).split(b" ")[1] == b"401"


@pytest.mark.parametrize("max_tokens", [-1, 0, LIMITS.max_context, 10**30])
def test_a_probe_that_no_context_holds_is_refused(max_tokens: int) -> None:
    async def run() -> None:
        failure = asyncio.get_running_loop().create_future()
        probe = ProbeSampler(None, [], LIMITS, want_routes=False)
        body = {"engine": "any", "max_tokens": max_tokens}
        async with (
            serve(failure, SimpleNamespace(), probe=probe) as (url, http),
            http.post(url + "/probe", json=body) as response,
        ):
            assert response.status == 400
            assert f"max_tokens={max_tokens}" in (await response.json())["error"]

    asyncio.run(run())


@pytest.mark.parametrize("died", [False, True])
def test_a_failed_probe_may_be_repeated_unless_the_run_cannot_go_on(died: bool) -> None:
    async def run() -> None:
        sound = answer([11, 12], finish_reason={"type": "length"})
        async with engine(b"<html>", sound) as (client, _):
            failure = asyncio.get_running_loop().create_future()
            prompts = [Prompt("p", ({"role": "user", "content": "hello"},))]
            probe = ProbeSampler(
                lambda *_, **__: {"input_ids": [1, 2, 3]}, prompts, LIMITS, want_routes=False, template_kwargs={}
            )
            async with serve(failure, SimpleNamespace(client=lambda _: client), probe=probe) as (url, http):
                body = {"engine": client.url, "max_tokens": 2}
                async with http.post(url + "/probe", json=body) as response:
                    assert response.status == 502
                    assert f"engine {client.url}/generate: unusable answer: no JSON" in (await response.json())["error"]
                if died:
                    failure.set_result(RolloutEnded("engine 0 died"))
                async with http.post(url + "/probe", json=body) as response:
                    if died:
                        assert (response.status, await response.json()) == (410, {"error": "engine 0 died"})
                    else:
                        assert response.status == 200
                        assert decode(await response.read())[0].tokens.tolist() == [1, 2, 3, 11, 12]

    asyncio.run(run())
