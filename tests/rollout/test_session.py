"""A session on a real server: what it stores equals what transformers computes from the same tokens."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hf_reference import forward, next_logprobs

from megatron_fr.agents.contract import Outcome
from megatron_fr.errors import EngineError
from megatron_fr.rollout.client import Completion, EngineClient
from megatron_fr.rollout.engine import Engine
from megatron_fr.rollout.session import EngineSession
from megatron_fr.trajectory import ModelLimits, Trajectory

pytestmark = pytest.mark.slow

PROMPT = list(range(20, 60))
OUTCOME = Outcome((), "stop", 1)


@asynccontextmanager
async def connect(
    engine: Engine, limits: ModelLimits, *, ignore_eos: bool = False, **options: Any
) -> AsyncIterator[EngineClient]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        client = EngineClient(engine.url, http, limits=limits, **{"temperature": 1.0, "timeout_s": 60.0, **options})
        client.version = await current_version(client)
        if ignore_eos:  # a random model samples the end token now and then
            original = client.generate

            async def past_the_end(*args: Any, **kwargs: Any) -> Completion:
                return await original(*args, **{**kwargs, "ignore_eos": True})

            client.generate = past_the_end  # type: ignore[method-assign]
        yield client


async def current_version(client: EngineClient) -> int:
    async with client._http.get(client.url + "/model_info") as answer:
        return int((await answer.json())["weight_version"])


async def post(client: EngineClient, path: str, **body: Any) -> Any:
    async with client._http.post(client.url + path, json=body) as answer:
        assert answer.status == 200, (path, await answer.text())
        return await answer.json(content_type=None)


async def load_weights(client: EngineClient, folder: Path, version: int) -> None:
    await post(client, "/pause_generation", mode="in_place")
    body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": False}
    assert (await post(client, "/update_weights_from_disk", **body))["success"]
    await post(client, "/continue_generation")


async def progress(client: EngineClient) -> None:
    """Return when requests sent before have sampled some 30 tokens: a short one, batched with them, is done then."""
    await asyncio.sleep(0.01)
    await client.generate([9, 8, 7], max_new_tokens=30, fresh=True)


def finish(session: EngineSession) -> Trajectory:
    return session.finish(OUTCOME, trajectory_id="t", prompt_id="p", group_id="t", reward=0.0, reward_parts={})


def check(trajectory: Trajectory, limits: ModelLimits, model: Path, temperature: float = 1.0) -> None:
    trajectory.validate(limits)
    tokens = trajectory.tokens.tolist()
    logprobs, routes, _ = forward(model, tokens, temperature=temperature)
    expected = next_logprobs(logprobs, tokens[1:])
    acted = trajectory.action_mask[1:]
    np.testing.assert_allclose(trajectory.behavior_logprobs[1:][acted], expected[acted], atol=1e-4)
    assert trajectory.route_error is None
    np.testing.assert_array_equal(trajectory.routed_experts, routes[:-1])


def test_logprobs_and_routes_of_a_multi_turn_session_equal_transformers(
    engine: Engine, limits: ModelLimits, models: list[Path]
) -> None:
    stops = {*range(60), json.loads((models[0] / "config.json").read_text())["eos_token_id"]}

    async def run() -> list[Trajectory]:
        async with connect(engine, limits) as client:

            async def one(seed: int) -> Trajectory:
                rng = np.random.default_rng(seed)
                session = EngineSession(client, limits, max_new_tokens=200, want_routes=True)
                session.observe([*PROMPT, seed])
                for turn in range(4):
                    generation = await session.generate(stop_token_ids=sorted(stops), max_tokens=40)
                    assert session.tokens[-len(generation.token_ids) :] == list(generation.token_ids)
                    stopped = generation.token_ids[-1] in stops
                    assert generation.finish_reason == ("stop" if stopped else "length")
                    if turn < 3:
                        session.observe(rng.integers(0, 500, size=int(rng.integers(1, 9))).tolist())
                return finish(session)

            return list(await asyncio.gather(*(one(seed) for seed in range(12))))

    trajectories = asyncio.run(run())
    assert len({t.num_action_tokens for t in trajectories}) > 1
    for trajectory in trajectories:
        check(trajectory, limits, models[0])


def test_logprobs_are_those_of_the_tempered_distribution(
    engine: Engine, limits: ModelLimits, models: list[Path]
) -> None:
    async def run() -> Trajectory:
        async with connect(engine, limits, temperature=0.6) as client:
            session = EngineSession(client, limits, max_new_tokens=60, want_routes=True)
            session.observe(PROMPT)
            await session.generate(stop_token_ids=[])
            return finish(session)

    check(asyncio.run(run()), limits, models[0], temperature=0.6)


def test_limits_bound_the_session_to_the_last_token(engine: Engine, limits: ModelLimits) -> None:
    small = ModelLimits(**{**vars(limits), "max_context": 100})

    async def run() -> None:
        async with connect(engine, small, ignore_eos=True) as client:
            session = EngineSession(client, small, max_new_tokens=1000, want_routes=True)
            session.observe(PROMPT)
            assert session.action_tokens_left == 60
            generation = await session.generate(stop_token_ids=[], max_tokens=10)
            assert (generation.finish_reason, len(generation.token_ids)) == ("length", 10)
            session.observe(range(45))
            left = session.action_tokens_left
            assert left == 100 - len(session.tokens)
            while session.action_tokens_left:
                await session.generate(stop_token_ids=[])
            assert len(session.tokens) == 100
            empty = await session.generate(stop_token_ids=[])
            assert (empty.token_ids, empty.finish_reason) == ((), "length")
            session.observe([1, 2, 3])
            assert len(session.tokens) == 100
            finish(session).validate(small)

            session = EngineSession(client, limits, max_new_tokens=7, want_routes=True)
            session.observe(PROMPT)
            while session.action_tokens_left:
                await session.generate(stop_token_ids=[], max_tokens=3)
            session.observe([5] * 30)  # an observation at the end is left out of the trajectory
            trajectory = finish(session)
            trajectory.validate(limits)
            assert len(trajectory) == len(PROMPT) + 7 == trajectory.routed_experts.shape[0] + 1

    asyncio.run(run())


def test_the_whole_context_of_the_engine_can_be_used(engine: Engine, limits: ModelLimits, models: list[Path]) -> None:
    async def run() -> Trajectory:
        async with connect(engine, limits) as client:
            session = EngineSession(client, limits, max_new_tokens=limits.max_context, want_routes=True)
            session.observe([7] * (limits.max_context - 20))
            while session.action_tokens_left:
                await session.generate(stop_token_ids=[])
            return finish(session)

    trajectory = asyncio.run(run())
    assert len(trajectory) == limits.max_context
    check(trajectory, limits, models[0])


def test_a_weight_update_in_mid_generation_is_recorded_token_by_token(
    engine: Engine, limits: ModelLimits, models: list[Path]
) -> None:
    async def run() -> tuple[list[Trajectory], Trajectory, int, int, int]:
        async with connect(engine, limits, ignore_eos=True) as client:
            old = client.version
            sessions = []
            for i in range(4):
                session = EngineSession(client, limits, max_new_tokens=900, want_routes=True)
                session.observe([*PROMPT, i])
                sessions.append(session)

            running = [asyncio.create_task(session.generate(stop_token_ids=[])) for session in sessions]
            await progress(client)
            await load_weights(client, models[1], old + 1)
            await asyncio.gather(*running)
            spanning = [finish(session) for session in sessions]

            # The next request knows the new version from the last answer: it must not read the old prefix.
            assert client.version == old + 1
            first = await client.generate([*PROMPT, 0], max_new_tokens=3)
            second = await client.generate([*PROMPT, 0], max_new_tokens=3)
            fresh = await client.generate([*PROMPT, 0], max_new_tokens=3, fresh=True)
            session = EngineSession(client, limits, max_new_tokens=50, want_routes=True)
            session.observe([*PROMPT, 0])
            await session.generate(stop_token_ids=[])
            after = finish(session)
            await load_weights(client, models[0], old + 2)
            return spanning, after, first.cached_tokens, second.cached_tokens, fresh.cached_tokens

    spanning, after, cached_first, cached_second, cached_fresh = asyncio.run(run())
    assert (cached_first, cached_fresh) == (0, 0)
    assert cached_second > 0
    check(after, limits, models[1])
    n = len(PROMPT) + 1
    boundaries = set()
    for trajectory in spanning:
        trajectory.validate(limits)
        assert trajectory.route_error is None
        versions = trajectory.versions[trajectory.action_mask]
        old, new = versions.min(), versions.max()
        assert (new - old, sorted(versions)) == (1, versions.tolist())
        old_tokens = int((versions == old).sum())
        boundaries.add(old_tokens)
        tokens = trajectory.tokens.tolist()
        # A processes everything up to the token before the last one it samples; B reads A's keys and values.
        split = n + old_tokens - 1
        logprobs_a, routes_a, past = forward(models[0], tokens[:split])
        logprobs_b, routes_b, _ = forward(models[1], tokens[split:], past=past)
        expected = next_logprobs(np.concatenate([logprobs_a, logprobs_b]), tokens[1:])
        got = trajectory.behavior_logprobs[1:]
        acted = trajectory.action_mask[1:]
        np.testing.assert_allclose(got[acted], expected[acted], atol=1e-4)
        np.testing.assert_array_equal(trajectory.routed_experts, np.concatenate([routes_a, routes_b])[:-1])
    assert min(boundaries) > 1


def test_an_aborted_request_keeps_its_tokens_and_the_turn_goes_on(
    engine: Engine, limits: ModelLimits, models: list[Path]
) -> None:
    async def run() -> tuple[Trajectory, list[int]]:
        async with connect(engine, limits, ignore_eos=True) as client:
            parts: list[int] = []
            original = client.generate

            async def spy(*args: Any, **kwargs: Any) -> Completion:
                completion = await original(*args, **kwargs)
                if kwargs["max_new_tokens"] == 30:
                    return completion
                parts.append(len(completion.token_ids) * (-1 if completion.finish_reason == "aborted" else 1))
                return completion

            client.generate = spy  # type: ignore[method-assign]
            session = EngineSession(client, limits, max_new_tokens=900, want_routes=True)
            session.observe(PROMPT)
            running = asyncio.create_task(session.generate(stop_token_ids=[]))
            for _ in range(2):
                await progress(client)
                async with client._http.post(client.url + "/abort_request", json={"abort_all": True}) as answer:
                    assert answer.status == 200
            await running
            return finish(session), parts

    trajectory, parts = asyncio.run(run())
    assert any(part < 0 for part in parts), parts
    assert sum(map(abs, parts)) == trajectory.num_action_tokens
    check(trajectory, limits, models[0])


def test_a_request_that_the_engine_refuses_names_the_engine_and_the_reason(engine: Engine, limits: ModelLimits) -> None:
    async def run() -> None:
        async with connect(engine, limits) as client:
            with pytest.raises(EngineError, match=rf"{engine.url}/generate: HTTP 400: .*context length"):
                await client.generate([5] * 5000, max_new_tokens=1)

    asyncio.run(run())


def test_an_engine_that_is_not_there_is_named(limits: ModelLimits) -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as http:
            client = EngineClient("http://127.0.0.1:9", http, limits=limits, temperature=1.0, timeout_s=5.0)
            with pytest.raises(EngineError, match=r"engine http://127.0.0.1:9/generate"):
                await client.generate([1, 2], max_new_tokens=1)

    asyncio.run(run())
