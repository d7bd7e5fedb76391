"""What is said of trajectories that hang, and of code that holds up all others."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from megatron_fr.agents.contract import Agent, Outcome, Prompt, RewardInput, TokenSession
from megatron_fr.agents.rewards import RewardRunner
from megatron_fr.config import RewardConfig, RolloutConfig
from megatron_fr.engines.client import EngineClient
from megatron_fr.engines.fleet import Fleet
from megatron_fr.errors import AgentTimeoutError
from megatron_fr.rollout import watchdog
from megatron_fr.rollout.session import EpisodeRunner
from megatron_fr.rollout.watchdog import EventLoopDelay, report_stuck, waits_for
from megatron_fr.trajectory import ModelLimits

LIMITS = ModelLimits(vocab_size=100, max_context=64)


class Hanging(Agent):
    """Hangs where the prompt says."""

    async def rollout(self, prompt: Prompt, session: TokenSession) -> Outcome:
        session.observe([1, 2, 3])
        if prompt.id == "agent":
            await asyncio.Event().wait()
        if prompt.id == "generation":
            await session.generate(stop_token_ids=[0])
        session.num_action_tokens = 1  # type: ignore[attr-defined]
        return Outcome((), "stop", 1)


async def hanging_reward(_: RewardInput) -> float:
    await asyncio.sleep(600)
    return 0.0


async def with_a_silent_engine(work: Any, timeout_s: float | None) -> Any:
    """``work(play, closed)`` beside an engine that never answers; ``closed`` is set once its request is given up."""
    closed = asyncio.Event()

    async def silence(_: web.Request) -> web.Response:
        try:
            await asyncio.sleep(600)
        finally:
            closed.set()
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/generate", silence)
    server = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    rewards = RewardRunner(RewardConfig(function="tests.rollout.test_watchdog:hanging_reward", timeout_s=600))
    await rewards.start()
    try:
        async with aiohttp.ClientSession() as http:
            fleet = Fleet([], LIMITS, temperature=1.0, request_timeout_s=600)
            url = f"http://127.0.0.1:{server.addresses[0][1]}"
            fleet.clients = [EngineClient(url, http, limits=LIMITS, temperature=1.0, timeout_s=600)]
            config = RolloutConfig(max_context=64, max_new_tokens=8)
            episodes = EpisodeRunner(fleet, Hanging(), rewards, LIMITS, config, False, timeout_s)

            def play(name: str) -> Awaitable[Any]:
                return episodes.run(Prompt(name, ()), trajectory_id=name, group_id=name)

            return await work(play, closed)
    finally:
        await server.cleanup()
        await rewards.stop()


def test_it_says_what_each_stuck_trajectory_waits_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_STUCK_S", 0.2)

    async def work(play: Any, _: asyncio.Event) -> dict[str, str]:
        tasks = {name: asyncio.create_task(play(name)) for name in ("agent", "generation", "reward")}
        await asyncio.sleep(0.3)
        found = {name: waits_for(task) for name, task in tasks.items()}
        stuck = asyncio.create_task(report_stuck(lambda: 0, lambda: {"generation": 3, "the reward": 1}))
        await asyncio.sleep(0.3)
        for task in (*tasks.values(), stuck):
            task.cancel()
        await asyncio.gather(*tasks.values(), stuck, return_exceptions=True)
        return found

    found = asyncio.run(with_a_silent_engine(work, None))
    lines, first = inspect.getsourcelines(Hanging.rollout)
    line = first + next(i for i, text in enumerate(lines) if "Event().wait()" in text)
    assert found == {"agent": f"agent code at {__file__}:{line}", "generation": "generation", "reward": "the reward"}
    assert "no trajectory has ended for 0 s: 3 wait for generation, 1 wait for the reward" in caplog.text


def test_an_agent_that_does_not_end_is_a_failed_trajectory_and_its_request_is_given_up() -> None:
    async def work(play: Any, closed: asyncio.Event) -> None:
        for name in ("agent", "generation"):
            with pytest.raises(AgentTimeoutError, match=rf"agent.timeout_s=0.3 .*\(prompt '{name}'\)"):
                await play(name)
        async with asyncio.timeout(5):
            await closed.wait()

    asyncio.run(with_a_silent_engine(work, 0.3))


def test_code_that_blocks_the_event_loop_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        task = asyncio.create_task(EventLoopDelay().run())
        for _ in range(2):
            await asyncio.sleep(0.2)
            time.sleep(1.6)
        task.cancel()

    asyncio.run(main())
    lines, first = inspect.getsourcelines(main)
    line = first + next(i for i, text in enumerate(lines) if "time.sleep" in text)
    assert caplog.text.count(f"blocked at {__file__}:{line} in main") == 1
