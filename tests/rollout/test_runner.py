"""The runner pool's bookkeeping, with episodes that fail on command (a real engine does not)."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fr.agents.contract import Prompt
from megatron_fr.errors import (
    AgentTimeoutError,
    EngineError,
    MegatronFRError,
    PromptTooLongError,
    RewardError,
    TrajectoryError,
)
from megatron_fr.observe.failures import FAILURES_FILE, commonest, read_failures
from megatron_fr.rollout import runner as runner_module
from megatron_fr.rollout.cursor import PromptCursor
from megatron_fr.rollout.failures import ALL_FAILED, ENOUGH, FailedPrompts
from megatron_fr.rollout.queue import TrajectoryQueue
from megatron_fr.rollout.runner import RunnerPool
from megatron_fr.rollout.staleness import StalenessGate
from megatron_fr.trajectory import ModelLimits, Trajectory
from tests.support.samples import trajectory

LIMITS = ModelLimits(vocab_size=100, max_context=8)
Play = Callable[[str, str], Awaitable[None]]  # trajectory id, prompt id


class ScriptedEpisodes:
    """Asks ``script`` what happens to an episode; returns a valid trajectory when it does not raise."""

    def __init__(self, script: Play) -> None:
        self._script = script
        self.names: list[str] = []
        self.running = self.most_running = 0

    async def run(self, prompt: Prompt, *, trajectory_id: str, group_id: str, queued_s: float) -> Trajectory:
        self.names.append(trajectory_id)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self._script(trajectory_id, prompt.id)
        finally:
            self.running -= 1
        return trajectory(trajectory_id, group=group_id, prompt_id=prompt.id)


class Bench:
    def __init__(
        self,
        script: Play,
        *,
        batch: int,
        group: int = 1,
        lag: int = 0,
        runners: int = 4,
        number: int = 10**9,
        folder: Path | None = None,
    ) -> None:
        self.failed = FailedPrompts(0.2, number, folder)
        finite = [Prompt(f"p{i}", ()) for i in range(number)] if number < 10**9 else None
        self.gate = StalenessGate(batch, lag)
        self.queue = TrajectoryQueue(
            batch_size=batch, group_size=group, max_policy_lag=100, limits=LIMITS, on_drop=self.gate.drop
        )
        self.episodes = ScriptedEpisodes(script)
        self.fatal: list[MegatronFRError] = []
        self.pool = RunnerPool(
            self.episodes,  # type: ignore[arg-type]
            PromptCursor(finite, skipped=self.failed.reasons)
            if finite
            else (Prompt(f"p{i}", ()) for i in itertools.count()),
            self.gate,
            self.queue,
            runners=runners,
            failed=self.failed,
            on_fatal=self.fatal.append,
        )

    async def batch(self) -> list[str]:
        async with asyncio.timeout(5):
            while (batch := self.queue.lease(0)) is None:
                await self.pool.wait_arrival(self.pool.finished)
        self.queue.commit(batch.batch_id)
        self.gate.consumed_batches += 1
        self.pool.wake()
        return [t.id for t in batch.trajectories]


@pytest.fixture(autouse=True)
def _no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_BACKOFF_S", 0.0)


def run(bench: Callable[[], Any]) -> Any:
    async def body() -> Any:
        return await bench()

    return asyncio.run(body())


def test_runners_work_side_by_side_and_never_pass_the_gate() -> None:
    async def body() -> None:
        async def script(*_: str) -> None:
            await asyncio.sleep(0.01)
            live = bench.gate.started - bench.gate.consumed_batches * 6
            assert live <= 2 * 6

        bench = Bench(script, batch=6, lag=1, runners=5)
        bench.pool.start()
        seen = [i for _ in range(5) for i in await bench.batch()]
        await bench.pool.stop()
        assert len(seen) == len(set(seen)) == 30
        assert bench.episodes.most_running == 5
        assert (bench.gate.failed, bench.pool.in_flight, bench.fatal) == (0, 0, [])

    run(body)


def test_with_a_closed_gate_the_pool_waits() -> None:
    async def body() -> None:
        async def script(*_: str) -> None: ...

        bench = Bench(script, batch=3, lag=0)
        bench.pool.start()
        await asyncio.sleep(0.05)
        assert len(bench.episodes.names) == 3
        await bench.batch()
        await asyncio.sleep(0.05)
        assert len(bench.episodes.names) == 6
        await bench.pool.stop()

    run(body)


def test_a_failed_member_is_tried_again_so_that_its_group_completes(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        failures = Counter[str]()

        async def script(trajectory_id: str, _: str) -> None:
            await asyncio.sleep(0)
            if trajectory_id.startswith("000000-1") and failures["x"] < 2:
                failures["x"] += 1
                raise EngineError("the engine said no")

        bench = Bench(script, batch=4, group=2)
        bench.pool.start()
        got = await bench.batch()
        await bench.pool.stop()
        assert sorted(got) == ["000000-0", "000000-1-retry2", "000001-0", "000001-1"]
        assert bench.gate.failed == 2
        assert bench.gate.live in (4, 8)  # the batch just consumed, and perhaps the next one
        assert "trajectory 000000-1 (prompt 'p0', attempt 1) failed; it is tried again: EngineError" in caplog.text

    run(body)


def test_a_group_that_cannot_complete_is_given_up_and_replaced() -> None:
    async def body() -> None:
        async def script(trajectory_id: str, prompt_id: str) -> None:
            await asyncio.sleep(0.001)
            if prompt_id == "p0" and "-1" in trajectory_id:
                raise ValueError("a bug in the agent")

        bench = Bench(script, batch=4, group=2)
        bench.pool.start()
        got = await bench.batch()
        assert {i.split("-")[0] for i in got} == {"000001", "000002"}
        assert (bench.gate.failed, bench.gate.dropped) == (3, 1)
        got = await bench.batch()
        assert {i.split("-")[0] for i in got} == {"000003", "000004"}
        await bench.pool.stop()
        assert not bench.fatal

    run(body)


def test_what_is_invalid_is_counted_as_refused_and_tried_again_unless_the_prompt_is_too_long() -> None:
    async def body() -> None:
        async def script(trajectory_id: str, prompt_id: str) -> None:
            if prompt_id == "p1":
                raise PromptTooLongError("nothing to sample")
            if trajectory_id == "000002":
                raise TrajectoryError("a log-probability is not finite")

        bench = Bench(script, batch=3)
        bench.pool.start()
        assert sorted(await bench.batch()) == ["000000", "000002-retry1", "000003"]
        await bench.pool.stop()
        assert bench.pool.refused == 2
        assert [i for i in bench.episodes.names if "retry" in i] == ["000002-retry1"]

    run(body)


async def fatal(bench: Bench) -> str:
    """The reason that ends the run."""
    bench.pool.start()
    consuming = asyncio.create_task(consume(bench))
    async with asyncio.timeout(10):
        while not bench.fatal:
            await asyncio.sleep(0.01)
    consuming.cancel()
    await bench.pool.stop()
    return str(bench.fatal[0])


async def consume(bench: Bench) -> None:
    while True:
        await bench.batch()


def test_nothing_but_failures_ends_the_run_after_a_few_prompts() -> None:
    async def body() -> None:
        async def script(*_: str) -> None:
            await asyncio.sleep(0)
            raise EngineError("no route to engine")

        bench = Bench(script, batch=4, runners=2)
        reason = await fatal(bench)
        assert f"{ALL_FAILED} of the last {ALL_FAILED} prompts failed for good" in reason
        assert "8 x EngineError: no route to engine" in reason

    run(body)


def test_the_run_ends_with_the_commonest_reason_when_too_many_prompts_fail() -> None:
    async def body() -> None:
        async def script(_: str, prompt_id: str) -> None:
            await asyncio.sleep(0.001)
            if (number := int(prompt_id[1:])) % 10 < 3:
                raise RewardError(f"reward on prompt {prompt_id!r}: {'KeyError' if number % 10 else 'TypeError'}")

        bench = Bench(script, batch=8, lag=2)
        reason = await fatal(bench)
        assert "more than rollout.max_failure_rate=0.2 allows" in reason
        assert "KeyError" in reason
        assert "TypeError" not in reason
        assert bench.pool.finished >= ENOUGH / 2

    run(body)


def test_a_prompt_that_fails_for_good_is_set_aside_named_and_never_played_again(tmp_path: Path) -> None:
    hopeless = {
        "p3": ValueError("no column 3"),
        "p17": AgentTimeoutError("too long"),
        "p29": PromptTooLongError("full"),
    }

    async def body() -> Bench:
        async def script(_: str, prompt_id: str) -> None:
            played[prompt_id] += 1
            await asyncio.sleep(0.001)
            if prompt_id in hopeless:
                raise hopeless[prompt_id]

        bench = Bench(script, batch=10, lag=1, number=40, folder=tmp_path / "run")
        bench.failed.restore({})
        bench.pool.start()
        for _ in range(4 * 4):  # four epochs and more
            await bench.batch()
        await bench.pool.stop()
        return bench

    played = Counter[str]()
    bench: Bench = run(body)
    assert not bench.fatal
    assert {name: played[name] for name in hopeless} == {"p3": 3, "p17": 1, "p29": 1}
    assert min(played[f"p{i}"] for i in range(40) if f"p{i}" not in hopeless) >= 3
    reasons = {name: f"{type(error).__name__}: {error}" for name, error in hopeless.items()}
    assert bench.failed.reasons == read_failures(tmp_path / "run") == reasons
    assert bench.failed.rate == pytest.approx(3 / 40)
    again = FailedPrompts(0.2, 40, tmp_path / "run")
    again.restore(reasons)
    assert read_failures(tmp_path / "run") == reasons
    again.restore({})
    assert not (tmp_path / "run" / FAILURES_FILE).exists()


def test_reasons_that_differ_in_names_and_numbers_are_of_one_kind() -> None:
    reasons = ["KeyError: 'a' at 7", "ValueError: x", "KeyError: 'b' at 12"]
    assert commonest(reasons, 2) == "2 x KeyError: 'b' at 12; 1 x ValueError: x"


def test_a_run_whose_prompts_were_all_set_aside_ends() -> None:
    async def body() -> None:
        async def script(*_: str) -> None:
            raise PromptTooLongError("too long")

        bench = Bench(script, batch=4, runners=1, number=3)
        assert "3 of the last 3 prompts failed for good" in await fatal(bench)

    run(body)
    cursor = PromptCursor([Prompt("a", ()), Prompt("b", ())], skipped={"a", "b"})
    with pytest.raises(MegatronFRError, match=r"all 2 prompts of data.train failed"):
        next(cursor)
