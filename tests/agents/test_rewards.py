from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_fr.agents.contract import Prompt, RewardInput
from megatron_fr.agents.rewards import RewardRunner
from megatron_fr.config import RewardConfig
from megatron_fr.errors import ConfigError, RewardError
from tests.support.processes import command_of, family_of, wait_gone

BY_TEXT = "tests.support.reward_functions:by_text"


def episode(text: str) -> RewardInput:
    prompt = Prompt("p7", ({"role": "user", "content": "hé?"},), 42, {"level": [1, None]})
    messages = (*prompt.messages, {"role": "assistant", "content": text})
    more: dict[str, Any] = {"num_turns": 2, "token_ids": (5, 6, 7), "num_action_tokens": 2, "info": {"seed": 9}}
    return RewardInput(prompt, messages, text, "length", 3, 1, reward={"reward": 0.25}, **more)


def scored[T](
    function: str | None, work: Callable[[RewardRunner], Awaitable[T]], log: Path | None = None, **config: Any
) -> T:
    async def main() -> T:
        runner = RewardRunner(RewardConfig(function=function, **config), log)
        await runner.start()
        try:
            return await work(runner)
        finally:
            await runner.stop()

    return asyncio.run(main())


def test_the_function_gets_the_whole_input_and_its_parts_come_back() -> None:
    function, args = "tests.support.reward_functions:echo", {"weight": 0.1}
    reward, parts = scored(function, lambda runner: runner.score(episode("0.5")), args=args)
    assert reward == 0.5
    counts = {"calls": 3.0, "errors": 1.0, "answer": 42.0, "tokens": 18.0, "acted": 2.0, "turns": 2.0, "seed": 9.0}
    assert parts == {"weight": 0.1, **counts}


def test_what_a_call_prints_and_its_traceback_are_in_the_log_with_file_and_line(tmp_path: Path) -> None:
    async def work(runner: RewardRunner) -> None:
        with pytest.raises(RewardError):
            await runner.score(episode("raise"))
        await runner.score(episode("x"))

    log = tmp_path / "logs" / "reward.log"
    scored(BY_TEXT, work, log=log)
    text = log.read_text()
    assert re.search(r"prompt 'p7': ValueError: this is not a number \(.*reward_functions\.py:\d+\)\n", text)
    assert re.search(r'File ".*reward_functions\.py", line \d+, in by_text\n', text)
    assert text.count("prompt 'p7'") == 1  # a call that prints nothing and succeeds leaves no line


def test_without_a_function_the_agents_own_reward_counts() -> None:
    async def work(runner: RewardRunner) -> None:
        assert await runner.score(replace(episode("x"), reward=0.5)) == (0.5, {})
        assert await runner.score(replace(episode("x"), reward={"reward": 1, "won": True})) == (1.0, {"won": 1.0})
        for reward, reason in (
            (None, "returned None"),
            ({"won": 1.0}, "without 'reward'"),
            (float("inf"), "reward=inf"),
        ):
            with pytest.raises(RewardError, match=f"the agent's reward on prompt 'p7': .*{reason}"):
                await runner.score(replace(episode("x"), reward=reward))

    scored(None, work)


def test_a_plain_number_is_a_reward_without_parts() -> None:
    assert scored(BY_TEXT, lambda runner: runner.score(episode("x"))) == (1.0, {})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise", "ValueError: this is not a number"),
        ("die", "ended without an answer .exit status 5"),
        ("killed", "ended without an answer .ended by SIGKILL"),
        ("exit", "SystemExit: 3"),
        ("huge", "returned what is no number: OverflowError: int too large to convert to float"),
        ("nan", "returned reward=nan"),
        ("none", "returned None"),
        ("no reward", "without 'reward'"),
        ("taken name", r"returned the parts \['pass'\], metrics of the reward itself; rename them"),
    ],
)
def test_a_failing_call_is_an_error_with_its_reason_and_the_runner_goes_on(text: str, reason: str) -> None:
    async def work(runner: RewardRunner) -> None:
        with pytest.raises(RewardError, match=reason) as caught:
            await runner.score(episode(text))
        assert "reward.function='tests.support.reward_functions:by_text' on prompt 'p7'" in str(caught.value)
        assert (await runner.score(episode("x")))[0] == 1.0

    scored(BY_TEXT, work)


def test_a_call_that_hangs_is_an_error_that_names_the_limit() -> None:
    async def work(runner: RewardRunner) -> None:
        with pytest.raises(RewardError, match=r"took longer than 0.5 s; raise reward.timeout_s=0.5"):
            await runner.score(episode("hang"))

    scored(BY_TEXT, work, timeout_s=0.5)


def test_calls_run_side_by_side_with_the_runs_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TEST_KEY", "17")

    async def work(runner: RewardRunner) -> None:
        started = time.monotonic()
        slow = await asyncio.gather(*(runner.score(episode("slow")) for _ in range(8)))
        assert [reward for reward, _ in slow] == [0.25] * 8
        assert time.monotonic() - started < 8 * 0.5
        assert (await runner.score(episode("pid")))[1]["key"] == 17

    scored(BY_TEXT, work)


def test_calls_beside_crashing_ones_are_untouched() -> None:
    async def work(runner: RewardRunner) -> list[Any]:
        texts = ["die" if number % 4 == 0 else "x" for number in range(20)]
        return await asyncio.gather(*(runner.score(episode(text)) for text in texts), return_exceptions=True)

    got = scored(BY_TEXT, work)
    assert [isinstance(answer, RewardError) for answer in got] == [number % 4 == 0 for number in range(20)]


def test_a_worker_imports_the_function_once_and_is_replaced_when_it_dies_idle() -> None:
    async def work(runner: RewardRunner) -> None:
        first, second = [(await runner.score(episode("pid")))[1] for _ in range(2)]
        assert (first["pid"], first["calls"]) == (second["pid"], second["calls"] - 1)
        os.kill(int(first["pid"]), signal.SIGKILL)
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(RewardError):
                    third = (await runner.score(episode("pid")))[1]
                    break
        assert third["pid"] != first["pid"]
        assert third["calls"] == 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REWARD_TEST_KEY", "1")
        scored(BY_TEXT, work, workers=1)


def test_a_program_that_a_hanging_function_started_ends_with_it() -> None:
    async def work(runner: RewardRunner) -> None:
        with pytest.raises(RewardError, match="took longer than 1 s"):
            await runner.score(episode("program"))

    scored(BY_TEXT, work, timeout_s=1, workers=1)
    started = [p for p in psutil.process_iter() if command_of(p) == "sleep 600.125"]
    assert not wait_gone(started, 5)


def test_workers_end_with_a_killed_service_even_in_the_middle_of_a_call() -> None:
    code = (
        "import asyncio\n"
        "from tests.agents.test_rewards import BY_TEXT, episode, scored\n"
        "if __name__ == '__main__':\n"
        "    scored(BY_TEXT, lambda runner: runner.score(episode('hang')), timeout_s=600)\n"
    )
    service = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 30
        while sum("spawn_main" in command_of(p) for p in family_of(service.pid)) < 4 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1)
        workers = family_of(service.pid)[1:]
        assert len(workers) >= 4
    finally:
        service.kill()
        service.wait()
    assert not wait_gone(workers, 5)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("no_such_module:f", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("tests.support.reward_functions:nope", "has no attribute 'nope'"),
        ("tests.support.reward_functions:NOT_CALLABLE", "not callable"),
        ("reward_functions", "is no import path"),
        ("tests.support.reward_functions:", "is no import path"),
    ],
)
def test_a_function_that_cannot_be_imported_is_refused_at_the_start(function: str, reason: str) -> None:
    async def main() -> None:
        runner = RewardRunner(RewardConfig(function=function))
        try:
            with pytest.raises(ConfigError) as caught:
                await runner.start()
        finally:
            await runner.stop()
        assert f"reward.function={function!r}" in str(caught.value)
        assert reason in str(caught.value)
        assert "give module:name" in str(caught.value)

    asyncio.run(main())


def test_the_arithmetic_reward_runs_in_a_worker() -> None:
    prompt = Prompt("p", ({"role": "user", "content": "?"},), 1617, {"intermediate": 1776})

    async def work(runner: RewardRunner) -> list[tuple[float, dict[str, float]]]:
        texts = ("\\boxed{1617}", "\\boxed{1776}", "1617")
        return [await runner.score(RewardInput(prompt, (), text, "stop", 1, 0)) for text in texts]

    right, early, bare = scored("megatron_fr.agents.arithmetic:exact_answer", work)
    assert right == (1.0, {"answered": 1.0, "stopped_early": 0.0, "used_tool": 1.0})
    assert early == (0.0, {"answered": 1.0, "stopped_early": 1.0, "used_tool": 1.0})
    assert bare == (0.0, {"answered": 0.0, "stopped_early": 0.0, "used_tool": 1.0})
