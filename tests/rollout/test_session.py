"""A session on a real server: what it stores equals what transformers computes from the same tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from megatron_fr.agents.contract import Outcome
from megatron_fr.engines.client import Completion, EngineClient
from megatron_fr.engines.engine import Engine
from megatron_fr.errors import EngineError
from megatron_fr.rollout.session import EngineSession
from megatron_fr.trajectory import ModelLimits, Trajectory
from tests.support.hf_reference import forward, next_logprobs
from tests.support.processes import family_of

pytestmark = pytest.mark.slow

PROMPT = list(range(20, 60))
OUTCOME = Outcome((), "stop", 1)


@asynccontextmanager
async def connect(
    engine: Engine, limits: ModelLimits, *, ignore_eos: bool = False, **options: Any
) -> AsyncIterator[EngineClient]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        client = EngineClient(engine.url, http, limits=limits, **{"temperature": 1.0, "timeout_s": 240.0, **options})
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
    return session.finish(OUTCOME, id="t", prompt_id="p", group_id="t", reward=0.0)


def check(trajectory: Trajectory, limits: ModelLimits, model: Path, temperature: float = 1.0) -> None:
    trajectory.validate(limits)
    tokens = trajectory.tokens.tolist()
    logprobs, routes, _ = forward(model, tokens, temperature=temperature)
    expected = next_logprobs(logprobs, tokens[1:])
    acted = trajectory.action_mask[1:]
    np.testing.assert_allclose(trajectory.behavior_logprobs[1:][acted], expected[acted], atol=1e-4)
    assert trajectory.route_error is None
    np.testing.assert_array_equal(trajectory.routed_experts, routes[:-1])


def check_spanning(trajectory: Trajectory, limits: ModelLimits, models: list[Path], split: int) -> None:
    """The first model processed ``split`` tokens, the second one the rest, reading the first one's keys and values."""
    trajectory.validate(limits)
    tokens = trajectory.tokens.tolist()
    logprobs_a, routes_a, past = forward(models[0], tokens[:split])
    logprobs_b, routes_b, _ = forward(models[1], tokens[split:], past=past)
    expected = next_logprobs(np.concatenate([logprobs_a, logprobs_b]), tokens[1:])
    acted = trajectory.action_mask[1:]
    np.testing.assert_allclose(trajectory.behavior_logprobs[1:][acted], expected[acted], atol=1e-4)
    assert trajectory.route_error is None
    np.testing.assert_array_equal(trajectory.routed_experts, np.concatenate([routes_a, routes_b])[:-1])


def check_rebuilt(
    trajectory: Trajectory, limits: ModelLimits, models: list[Path], processed: int, sampled: int
) -> None:
    """The first model processed and sampled so many tokens; then the second one computed the whole context anew.

    The rows of the first part stay those that its tokens were sampled with.
    """
    trajectory.validate(limits)
    tokens = trajectory.tokens.tolist()
    logprobs, routes = zip(*(forward(model, tokens)[:2] for model in models), strict=True)
    acted = trajectory.action_mask[1:]
    got = trajectory.behavior_logprobs[1:][acted]
    expected = [next_logprobs(values, tokens[1:])[acted] for values in logprobs]
    np.testing.assert_allclose(got[:sampled], expected[0][:sampled], atol=1e-4)
    np.testing.assert_allclose(got[sampled:], expected[1][sampled:], atol=1e-4)
    assert trajectory.route_error is None
    np.testing.assert_array_equal(trajectory.routed_experts[:processed], routes[0][:processed])
    np.testing.assert_array_equal(trajectory.routed_experts[processed:], routes[1][processed:-1])


def watch(client: EngineClient, *, full_prefix: bool = False) -> list[Completion]:
    """The answers that ``client`` gets from here on.

    Args:
        full_prefix: the engine returns all rows of a request's tokens, as one that ignores the start does.
    """
    answers: list[Completion] = []
    original = client.generate

    async def generate(*args: Any, routes_from: int | None = None, **kwargs: Any) -> Completion:
        start = 0 if full_prefix and routes_from is not None else routes_from
        answers.append(await original(*args, routes_from=start, **kwargs))
        return answers[-1]

    client.generate = generate  # type: ignore[method-assign]
    return answers


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


def test_a_session_may_sample_at_a_temperature_of_its_own(engine: Engine, limits: ModelLimits) -> None:
    async def main() -> list[list[int]]:
        async with connect(engine, limits, ignore_eos=True) as client:
            sampled = []
            for temperature in (0.0, 0.0, None, None):
                session = EngineSession(client, limits, max_new_tokens=16, want_routes=False, temperature=temperature)
                session.observe(PROMPT)
                await session.generate(stop_token_ids=[])
                sampled.append(list(session.tokens))
            return sampled

    greedy, again, one, other = asyncio.run(main())
    assert greedy == again
    assert one != other


def test_an_engine_without_requests_leaves_the_processor_to_others(engine: Engine) -> None:
    family = family_of(engine.pid)

    def used() -> float:
        return sum(time.user + time.system for time in (process.cpu_times() for process in family))

    async def idle() -> float:
        before = used()
        await asyncio.sleep(4)
        return used() - before

    assert asyncio.run(idle()) < 1  # seconds; a scheduler that looks for work all the time uses nearly all 4


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
    async def run(left: int) -> Trajectory:
        async with connect(engine, limits) as client:
            session = EngineSession(client, limits, max_new_tokens=limits.max_context, want_routes=True)
            session.observe([7] * (limits.max_context - left))
            while session.action_tokens_left:
                await session.generate(stop_token_ids=[])
            return finish(session)

    for left in (20, 7, 6, 5, 4, 3, 2, 1):
        trajectory = asyncio.run(run(left))
        assert len(trajectory) == limits.max_context
    check(trajectory, limits, models[0])


@pytest.mark.parametrize("resumed", [False, True], ids=["prefix of a version", "resumed request"])
def test_no_client_reads_what_another_one_or_another_start_left_in_the_cache(
    engine: Engine, limits: ModelLimits, models: list[Path], resumed: bool
) -> None:
    """A restarted service, another run and a resume that repeats a version number meet a cache of other weights."""
    prompt = random_tokens(71 + resumed, 150)

    async def roll(client: EngineClient) -> Trajectory:
        session = EngineSession(client, limits, max_new_tokens=8, want_routes=True)
        session.observe(prompt)
        completion = await session._request([], 8, resumed)
        assert completion.cached_tokens == 0
        return finish(session)

    async def run() -> list[Trajectory]:
        async with connect(engine, limits, ignore_eos=True) as first:
            version = first.version
            trajectories = [await roll(first)]
            await load_weights(first, models[1], version)
            async with connect(engine, limits, ignore_eos=True) as second:
                trajectories.append(await roll(second))
            first.forget_prefixes()  # as the fleet does when a trainer starts
            trajectories.append(await roll(first))
            await load_weights(first, models[0], version)
            return trajectories

    before, other_client, other_start = asyncio.run(run())
    check(before, limits, models[0])
    check(other_client, limits, models[1])
    check(other_start, limits, models[1])


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
        versions = trajectory.versions[trajectory.action_mask]
        old, new = versions.min(), versions.max()
        assert (new - old, sorted(versions)) == (1, versions.tolist())
        old_tokens = int((versions == old).sum())
        boundaries.add(old_tokens)
        # A processes everything up to the token before the last one it samples.
        check_spanning(trajectory, limits, models, n + old_tokens - 1)
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


def random_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 500, size=count).tolist()


def test_prompts_and_tool_output_longer_than_a_prefill_chunk(
    engine: Engine, limits: ModelLimits, models: list[Path]
) -> None:
    log, chunk = engine.spec.log_path, engine.spec.args["chunked-prefill-size"]
    assert chunk == 96
    before = len(log.read_text())

    async def run() -> list[Trajectory]:
        async with connect(engine, limits, ignore_eos=True) as client:

            async def one(seed: int, prompt: int, output: int) -> Trajectory:
                session = EngineSession(client, limits, max_new_tokens=64, want_routes=True)
                session.observe(random_tokens(seed, prompt))
                await session.generate(stop_token_ids=[], max_tokens=20)
                session.observe(random_tokens(seed + 100, output))
                await session.generate(stop_token_ids=[], max_tokens=20)
                return finish(session)

            sizes = [(96, 3), (97, 96), (200, 150), (500, 300), (30, 250)]
            # Some alone, some in parts beside the decoding of others.
            alone = [await one(seed, *size) for seed, size in enumerate(sizes[2:3])]
            return alone + list(await asyncio.gather(*(one(seed, *size) for seed, size in enumerate(sizes, start=10))))

    for trajectory in asyncio.run(run()):
        check(trajectory, limits, models[0])
    parts = [line for line in log.read_text()[before:].splitlines() if f"#new-token: {chunk}," in line]
    assert len(parts) > 10, "the engine did not prefill in parts"


@pytest.mark.parametrize("full_prefix", [False, True])
def test_prefixes_that_other_requests_and_earlier_turns_left_in_the_cache(
    engine: Engine, limits: ModelLimits, models: list[Path], full_prefix: bool
) -> None:
    common = random_tokens(50 + full_prefix, 230)

    async def run() -> tuple[list[Trajectory], list[int]]:
        async with connect(engine, limits, ignore_eos=True) as client:
            answers = watch(client, full_prefix=full_prefix)

            async def one(own: int) -> Trajectory:
                session = EngineSession(client, limits, max_new_tokens=64, want_routes=True)
                session.observe([*common, *random_tokens(own, own)])
                for turn in range(3):
                    await session.generate(stop_token_ids=[], max_tokens=12)
                    session.observe(random_tokens(own + turn, 5))
                return finish(session)

            first = await one(0)
            # The same prompt again, and others that leave the common prefix at its end.
            rest = await asyncio.gather(*(one(own) for own in (0, 1, 7, 130)))
            return [first, *rest], [answer.cached_tokens for answer in answers]

    trajectories, cached = asyncio.run(run())
    assert cached[0] == 0
    assert min(cached[1:]) >= len(common) - 1
    assert max(cached) > len(common) + 130  # a later turn's own prefix
    for trajectory in trajectories:
        check(trajectory, limits, models[0])


def test_weights_that_change_between_two_turns(engine: Engine, limits: ModelLimits, models: list[Path]) -> None:
    prompt = random_tokens(70, 150)

    async def run() -> list[tuple[bool, Trajectory, int]]:
        async with (
            connect(engine, limits, ignore_eos=True) as told,
            connect(engine, limits, ignore_eos=True) as not_told,
        ):
            sessions = []
            for full_prefix in (False, True):
                for client in (told, not_told):
                    session = EngineSession(client, limits, max_new_tokens=64, want_routes=True)
                    session.observe([*prompt, int(full_prefix)])
                    sessions.append((client, full_prefix, session))
            old = told.version
            for *_, session in sessions:
                await session.generate(stop_token_ids=[], max_tokens=12)
                session.observe([3, 4, 5])
            await load_weights(told, models[1], old + 1)
            told.version = old + 1  # as the trainer's commit does
            finished = []
            for client, full_prefix, session in sessions:
                client.version = old + (client is told)
                plain = client.generate
                (answers := watch(client, full_prefix=full_prefix)).clear()
                await session.generate(stop_token_ids=[], max_tokens=12)
                client.generate = plain  # type: ignore[method-assign]
                finished.append((client is told, finish(session), answers[0].cached_tokens))
            await load_weights(told, models[0], old + 2)
            return finished

    for told, trajectory, cached in asyncio.run(run()):
        processed = len(prompt) + 1 + 12 - 1
        if not told:
            # Sent as a request of the old version: the new weights read what the old ones left in the cache.
            assert cached == processed
            check_spanning(trajectory, limits, models, processed)
            continue
        assert cached < processed
        check_rebuilt(trajectory, limits, models, processed, 12)


@pytest.mark.parametrize("full_prefix", [False, True])
def test_a_request_that_is_aborted_for_new_weights_and_resumed_under_them(
    engine: Engine, limits: ModelLimits, models: list[Path], full_prefix: bool
) -> None:
    async def run() -> tuple[Trajectory, list[Completion], int]:
        async with connect(engine, limits, ignore_eos=True) as client:
            old = client.version
            session = EngineSession(client, limits, max_new_tokens=600, want_routes=True)
            session.observe(random_tokens(80 + full_prefix, 120))
            running = asyncio.create_task(session.generate(stop_token_ids=[]))
            await progress(client)
            answers = watch(client, full_prefix=full_prefix)
            await post(client, "/pause_generation", mode="abort")
            body = {"model_path": str(models[1]), "weight_version": str(old + 1), "flush_cache": False}
            assert (await post(client, "/update_weights_from_disk", **body))["success"]
            await post(client, "/continue_generation")
            await running
            await load_weights(client, models[0], old + 2)
            return finish(session), answers, old

    trajectory, answers, old = asyncio.run(run())
    (resumed,) = answers
    sampled = trajectory.num_action_tokens - len(resumed.token_ids)
    assert sampled > 0
    assert len(resumed.token_ids) > 0
    split = 120 + sampled - 1
    assert resumed.cached_tokens == 0
    check_rebuilt(trajectory, limits, models, split, sampled)
    versions = trajectory.versions[trajectory.action_mask]
    # A token may be labelled one version too old, never too new.
    assert set(versions[: sampled + 1]) == {old}
    assert set(versions[sampled + 1 :]) <= {old, old + 1}
    assert versions[-1] == old + 1


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
