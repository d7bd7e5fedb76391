"""What the client and the session make of answers that a healthy engine never gives; a small HTTP server gives them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from megatron_fr.agents.contract import Outcome
from megatron_fr.engines.client import EngineClient, older_side
from megatron_fr.engines.probe import probe_engine
from megatron_fr.errors import EngineError
from megatron_fr.rollout.session import EngineSession
from megatron_fr.trajectory import ModelLimits, Trajectory

LIMITS = ModelLimits(vocab_size=100, max_context=64, num_moe_layers=2, top_k=2, num_experts=8)


def routes(rows: int, start: int = 0) -> np.ndarray:
    """Distinct experts in every row, different from row to row: int32 ``[rows, 2, 2]``."""
    t = np.arange(start, start + rows)[:, None, None]
    return ((t + np.array([[0, 1], [2, 3]])) % 8).astype(np.int32)


def encoded(rows: np.ndarray) -> str:
    return base64.b64encode(rows.astype(np.int32).tobytes()).decode()


def answer(tokens: list[int], **meta: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "weight_versions": [{"version": "0", "start": 0, "end": len(tokens)}],
    }
    return {"output_ids": tokens, "meta_info": {**fields, **meta}}


@asynccontextmanager
async def engine(*answers: Any, timeout_s: float = 5.0) -> AsyncIterator[tuple[EngineClient, list[dict[str, Any]]]]:
    """An engine that gives these answers in turn, and the requests it got. A float is a delay, bytes go out as is."""
    requests: list[dict[str, Any]] = []

    async def generate(request: web.Request) -> web.Response:
        requests.append(await request.json())
        given = answers[len(requests) - 1]
        if callable(given):
            given = given(requests[-1])
        if isinstance(given, float):
            await asyncio.sleep(given)
            given = {}
        if isinstance(given, bytes):
            return web.Response(body=given)
        return web.json_response(given)

    app = web.Application()
    app.router.add_post("/generate", generate)
    server = web.AppRunner(app, shutdown_timeout=0.1)
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{server.addresses[0][1]}"
            yield EngineClient(url, http, limits=LIMITS, temperature=1.0, timeout_s=timeout_s), requests
    finally:
        await server.cleanup()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"text": "hello"}, "no meta_info"),
        ({"meta_info": {}}, "output_ids is None"),
        (answer([1, 2]) | {"output_ids": ["1"]}, "output_ids is"),
        (answer([1, 200]), r"outside 0\.\.99"),
        (answer([1], finish_reason=None), "finish_reason is None"),
        (answer([1], finish_reason={"type": "odd"}), "finish_reason is"),
        (answer([1, 2], output_token_logprobs=[[-1.0, 1]]), "1 rows for 2 tokens"),
        (answer([1, 2], output_token_logprobs=[[-1.0, 2], [-1.0, 1]]), r"output_token_logprobs\[0\]"),
        (answer([1], output_token_logprobs=[[None, 1]]), "finite"),
        (answer([1], weight_versions=None), "weight_versions is None, expected a list of spans"),
        (answer([1], weight_versions=[{"version": "default", "start": 0, "end": 1}]), "default"),
        (answer([1, 2], weight_versions=[{"version": "0", "start": 0, "end": 1}]), "cover 1 of 2 tokens"),
        (answer([1, 2], weight_versions=[{"version": "0", "start": 1, "end": 2}]), "gap or overlap"),
        (b"<html>", "no JSON"),
    ],
)
def test_an_unusable_answer_is_one_error_that_names_the_engine(given: Any, reason: str) -> None:
    async def run() -> None:
        async with engine(given) as (client, _):
            with pytest.raises(EngineError, match=reason) as caught:
                await client.generate([1], max_new_tokens=2)
            assert client.url in str(caught.value)

    asyncio.run(run())


def test_a_silent_engine_times_out_with_the_name_of_the_setting() -> None:
    async def run() -> None:
        async with engine(5.0, timeout_s=0.2) as (client, _):
            with pytest.raises(EngineError, match=r"no answer within rollout.request_timeout_s=0.2"):
                await client.generate([1], max_new_tokens=2)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("labels", "sent_at", "expected"),
    [
        ([0, 0, 1, 1], 0, [0, 0, 0, 1]),
        ([0, 1, 2, 2], 0, [0, 0, 1, 2]),
        ([1, 1, 1], 0, [0, 1, 1]),
        ([1, 1], 1, [1, 1]),
        ([1, 1], 2, [1, 1]),
        ([3, 3], None, [3, 3]),
        ([], 0, []),
    ],
)
def test_version_labels_err_on_the_old_side(labels: list[int], sent_at: int | None, expected: list[int]) -> None:
    assert older_side(labels, sent_at) == expected


def test_requests_ask_for_the_full_distribution_and_key_the_cache_by_version() -> None:
    async def run() -> None:
        newer = answer([1, 2], weight_versions=[{"version": "4", "start": 0, "end": 2}])
        async with engine(newer, answer([1]), answer([1]), answer([1])) as (client, requests):
            client.version = 3
            completion = await client.generate([5, 6], max_new_tokens=7, stop_token_ids=[9], routes_from=None)
            assert completion.versions == [3, 4]
            await client.generate([5, 6], max_new_tokens=1)
            await client.generate([5, 6], max_new_tokens=1, fresh=True)
            params = requests[0]["sampling_params"]
            assert (params["top_p"], params["top_k"], params["min_p"], params["repetition_penalty"]) == (1, -1, 0, 1)
            assert (params["max_new_tokens"], params["stop_token_ids"], params["temperature"]) == (7, [9], 1.0)
            keys = [r["extra_key"] for r in requests]
            assert [key.partition("-")[2] for key in keys[:2]] == ["version-3", "version-4"]
            assert len({key.partition("-")[0] for key in keys}) == 1  # one client's
            assert keys[2] not in keys[:2]
            client.forget_prefixes()
            await client.generate([5, 6], max_new_tokens=1)
            assert requests[3]["extra_key"].endswith("-version-4")
            assert requests[3]["extra_key"] != keys[1]
            assert "return_routed_experts" not in requests[0]

    asyncio.run(run())


def play(*answers: Any, observations: list[list[int]]) -> tuple[Trajectory, list[dict[str, Any]]]:
    async def run() -> tuple[Trajectory, list[dict[str, Any]]]:
        async with engine(*answers) as (client, requests):
            session = EngineSession(client, LIMITS, max_new_tokens=32, want_routes=True)
            for tokens in observations:
                session.observe(tokens)
                await session.generate(stop_token_ids=[])
            trajectory = session.finish(Outcome((), "stop", 2), id="t", prompt_id="p", group_id="t", reward=0.0)
            trajectory.validate(LIMITS)
            return trajectory, requests

    return asyncio.run(run())


TURNS = [[1, 2, 3], [4, 5]]  # the sequence 1 2 3 | 11 12 | 4 5 | 13 14: nine tokens, eight rows
EXPECTED = routes(8)


def test_rows_of_later_turns_are_asked_for_from_where_they_are_missing() -> None:
    trajectory, requests = play(
        answer([11, 12], routed_experts=encoded(routes(4))),
        answer([13, 14], routed_experts=encoded(routes(4, start=4))),
        observations=TURNS,
    )
    assert [r["routed_experts_start_len"] for r in requests] == [0, 4]
    assert requests[1]["input_ids"] == [1, 2, 3, 11, 12, 4, 5]
    np.testing.assert_array_equal(trajectory.routed_experts, EXPECTED)
    assert trajectory.routed_experts.dtype == np.uint8


def test_an_engine_that_returns_the_full_prefix_each_turn_is_understood() -> None:
    trajectory, _ = play(
        answer([11, 12], routed_experts=encoded(routes(4))),
        answer([13, 14], routed_experts=encoded(routes(8))),
        observations=TURNS,
    )
    np.testing.assert_array_equal(trajectory.routed_experts, EXPECTED)


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"routed_experts": encoded(routes(3))}, "3 rows from row 4 on, expected 4"),
        ({"routed_experts": encoded(routes(5))}, "5 rows from row 4 on, expected 4"),
        ({}, "returned no routes"),
        ({"routed_experts": "!!"}, "cannot be decoded"),
        ({"routed_experts": encoded(routes(4))[:-8]}, "no multiple of 4"),
        ({"routed_experts": encoded(routes(4) + 4)}, "name experts 4 to 10, the model has 8"),
        (
            {
                "routed_experts": encoded(routes(4)),
                "num_retractions": 1,
                "weight_versions": [{"version": "0", "start": 0, "end": 1}, {"version": "1", "start": 1, "end": 2}],
            },
            "retracted the request across a weight update",
        ),
    ],
)
def test_rows_that_do_not_fit_cost_the_routes_but_not_the_trajectory(second: dict[str, Any], reason: str) -> None:
    trajectory, _ = play(
        answer([11, 12], routed_experts=encoded(routes(4))), answer([13, 14], **second), observations=TURNS
    )
    assert trajectory.routed_experts is None
    assert reason in trajectory.route_error
    assert trajectory.num_action_tokens == 4


def test_an_engine_that_only_aborts_ends_the_turn_as_aborted() -> None:
    async def run() -> None:
        nothing = answer([], finish_reason={"type": "abort"}, output_token_logprobs=[])
        async with engine(*[nothing] * 20) as (client, requests):
            session = EngineSession(client, LIMITS, max_new_tokens=32, want_routes=True)
            session.observe([1, 2])
            generation = await session.generate(stop_token_ids=[])
            assert (generation.finish_reason, len(requests)) == ("aborted", 8)

    asyncio.run(run())


def probe_answer(change: Any) -> Any:
    def reply(request: dict[str, Any]) -> dict[str, Any]:
        tokens = list(range(10, 18))
        rows = routes(len(request["input_ids"]) + len(tokens) - 1 - request["routed_experts_start_len"])
        return answer(tokens, routed_experts=encoded(change(rows)))

    return reply


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda rows: rows[1:], r"18 rows of routes from row 0 on, expected 19"),
        (lambda rows: rows + 1, "name experts 1 to 8, the model has 8"),
        (lambda rows: np.broadcast_to(rows[:1], rows.shape), "the same routes for all 7 sampled tokens"),
        (lambda rows: np.where(np.arange(2) == 1, rows[..., :1], rows), "names an expert twice"),
    ],
)
def test_the_start_up_probe_finds_routes_that_cannot_be_right(change: Any, reason: str) -> None:
    async def run() -> None:
        async with engine(*[probe_answer(change)] * 2) as (client, _):
            with pytest.raises(EngineError, match=f"({reason}).*train.routing_replay=off"):
                await probe_engine(client, LIMITS, want_routes=True)

    asyncio.run(run())


def test_the_start_up_probe_accepts_routes_that_fit() -> None:
    async def run() -> None:
        async with engine(*[probe_answer(lambda rows: rows)] * 2) as (client, requests):
            await probe_engine(client, LIMITS, want_routes=True)
            assert [r["routed_experts_start_len"] for r in requests] == [0, 6]

    asyncio.run(run())
