from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from megatron_fr.agents.contract import Prompt
from megatron_fr.agents.rewards import FatalRewardError
from megatron_fr.errors import EngineError, RolloutEnded
from megatron_fr.rollout.evaluate import evaluate, summarise
from megatron_fr.rollout.metrics import batch_metrics
from megatron_fr.trajectory import Timings, Trajectory
from tests.support.samples import trajectory

PROMPTS = [Prompt(name, ()) for name in ("easy", "hard", "broken")]


def test_avg_at_k_averages_within_prompts_first_and_pass_at_k_takes_the_best() -> None:
    groups = [
        [trajectory("a0", reward=1.0), trajectory("a1", reward=0.0)],
        [trajectory("b0", reward=0.0, finish_reason="length", num_tool_calls=4)],
    ]
    metrics = summarise(groups)
    assert metrics["reward"] == 0.25  # not 1/3, the mean over trajectories
    assert metrics["pass"] == 0.5
    assert metrics["tool_calls"] == pytest.approx(4 / 3)
    assert metrics["truncated"] == pytest.approx(1 / 3)


def test_a_part_of_the_reward_is_averaged_over_those_that_have_it_in_evaluation_as_in_training() -> None:
    group = [
        trajectory("a", reward_parts={"format": 0.5, "tests": 1.0}),
        trajectory("b", reward_parts={"format": 1.0}),
        trajectory("c"),
    ]
    held_out, training = summarise([group[:1], group[1:]]), batch_metrics(group)
    assert (held_out["format"], held_out["tests"]) == (0.75, 1.0)
    assert (training["reward/format"], training["reward/tests"]) == (0.75, 1.0)


class Player:
    def __init__(self, always_broken: bool = False) -> None:
        self.attempts: dict[str, int] = {}
        self.running = self.most_running = 0
        self.always_broken = always_broken

    async def play(self, prompt: Prompt, *, trajectory_id: str, group_id: str) -> Trajectory:
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        await asyncio.sleep(0.001)
        self.running -= 1
        attempt = self.attempts[trajectory_id] = self.attempts.get(trajectory_id, 0) + 1
        if prompt.id == "broken" and (attempt < 3 or self.always_broken):
            raise EngineError("no answer")
        return trajectory(trajectory_id, reward=float(prompt.id == "easy"), reward_parts={"answered": 1.0})


def run(player: Any, prompts: list[Prompt] = PROMPTS) -> tuple[dict[str, float], int]:
    return asyncio.run(evaluate(player, prompts, samples=2, concurrency=3, name="x"))


def test_an_evaluation_plays_every_prompt_k_times_and_tries_failures_again() -> None:
    player = Player()
    metrics, count = run(player)
    assert (count, metrics["failed"]) == (6, 0)
    assert metrics["reward"] == pytest.approx(1 / 3)
    assert metrics["answered"] == 1.0
    assert player.most_running == 3
    assert sorted(player.attempts.values()) == [1, 1, 1, 1, 3, 3]


def test_what_cannot_be_scored_is_counted_and_left_out() -> None:
    metrics, count = run(Player(always_broken=True))
    assert (count, metrics["failed"], metrics["reward"]) == (4, 2, 0.5)


def test_an_evaluation_without_any_score_is_an_error_with_the_last_reason() -> None:
    with pytest.raises(RolloutEnded, match=r"none of 2 trajectories could be scored; .*'broken'.*no answer"):
        run(Player(always_broken=True), PROMPTS[2:])


def test_an_agent_that_raises_something_of_its_own_costs_its_trajectory_alone() -> None:
    class Buggy(Player):
        async def play(self, prompt: Prompt, **names: Any) -> Trajectory:
            if prompt.id == "hard":
                raise ValueError("a bug of the agent")
            return await super().play(prompt, **names)

    metrics, count = run(Buggy())
    assert (count, metrics["failed"]) == (4, 2)


def test_a_reward_function_that_keeps_failing_ends_the_evaluation() -> None:
    class Fatal(Player):
        async def play(self, *_: Any, **__: Any) -> Trajectory:
            raise FatalRewardError("failed 8 times in a row")

    with pytest.raises(FatalRewardError, match="failed 8 times in a row"):
        run(Fatal())


def test_batch_metrics_are_averages_of_the_batch() -> None:
    batch = [
        trajectory("a", reward=1.0, reward_parts={"format": 1.0}, timings=Timings(0, 3, 1), num_tool_calls=2),
        trajectory("b", reward=0.0, reward_parts={"format": 0.5}, timings=Timings(1, 3, 0), finish_reason="length"),
    ]
    batch[1].route_error = "the engine returned no routes"
    metrics = batch_metrics(batch, lags=(0, 3))
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/format"] == 0.75
    assert metrics["tools/calls"] == 1.0
    assert metrics["trajectory/truncated"] == 0.5
    assert (metrics["trajectory/tokens_p50"], metrics["trajectory/action_tokens_mean"]) == (4, 2)
    assert (metrics["policy_lag/min"], metrics["policy_lag/mean"], metrics["policy_lag/max"]) == (0, 1.5, 3)
    assert metrics["rollout/routes_missing"] == 1  # of the other one, none were asked for
    shares = [metrics[f"rollout/time_{name}"] for name in ("queued", "generating", "tools")]
    np.testing.assert_allclose(shares, [1 / 8, 6 / 8, 1 / 8])
