from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from megatron_fr.agents.contract import Prompt
from megatron_fr.errors import AgentTimeoutError, EngineError, RolloutEnded
from megatron_fr.rollout import watchdog
from megatron_fr.rollout.evaluate import HeldOut, evaluate, evaluate_sets
from megatron_fr.rollout.metrics import batch_metrics, evaluation_metrics
from megatron_fr.trajectory import Timings, Trajectory
from tests.support.samples import trajectory

PROMPTS = [Prompt(name, ()) for name in ("easy", "hard", "broken")]


def test_avg_at_k_averages_within_prompts_first_and_pass_at_k_takes_the_best() -> None:
    groups = [
        [trajectory("a0", reward=1.0), trajectory("a1", reward=0.0)],
        [trajectory("b0", reward=0.0, finish_reason="length", num_tool_calls=4)],
    ]
    metrics = evaluation_metrics(groups, 0.5)
    assert metrics["reward/mean"] == 0.25  # not 1/3, the mean over trajectories
    assert metrics["reward/pass"] == 0.5
    assert metrics["tools/calls"] == pytest.approx(4 / 3)
    assert metrics["trajectory/truncated"] == pytest.approx(1 / 3)
    assert [evaluation_metrics(groups, threshold)["reward/pass"] for threshold in (-0.5, 1.0)] == [1.0, 0.0]


def test_a_part_of_the_reward_is_averaged_over_those_that_have_it_in_evaluation_as_in_training() -> None:
    group = [
        trajectory("a", reward_parts={"format": 0.5, "tests": 1.0, "truncated": 0.25}),
        trajectory("b", reward_parts={"format": 1.0}),
        trajectory("c"),
    ]
    held_out, training = evaluation_metrics([group[:1], group[1:]], 0.5), batch_metrics(group)
    for metrics in (held_out, training):
        assert (metrics["reward/format"], metrics["reward/tests"]) == (0.75, 1.0)
        assert (metrics["reward/truncated"], metrics["trajectory/truncated"]) == (0.25, 0.0)
    only_held_out = {"reward/pass"}
    assert held_out.keys() - only_held_out == {name for name in training if not name.startswith("rollout/")}


class Episodes:
    def __init__(self, always_broken: bool = False) -> None:
        self.attempts: dict[str, int] = {}
        self.temperatures: set[float | None] = set()
        self.running = self.most_running = 0
        self.always_broken = always_broken

    async def run(self, prompt: Prompt, *, trajectory_id: str, group_id: str, temperature: float | None) -> Trajectory:
        self.temperatures.add(temperature)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        await asyncio.sleep(0.001)
        self.running -= 1
        attempt = self.attempts[trajectory_id] = self.attempts.get(trajectory_id, 0) + 1
        if prompt.id == "broken" and (attempt < 3 or self.always_broken):
            raise EngineError("no answer")
        return trajectory(trajectory_id, reward=float(prompt.id == "easy"), reward_parts={"answered": 1.0})


def run(episodes: Any, prompts: list[Prompt] = PROMPTS) -> tuple[dict[str, float], int]:
    return asyncio.run(evaluate(episodes, HeldOut("", prompts, 2, 0.5), concurrency=3, pass_threshold=0.5, name="x"))


def test_an_evaluation_plays_every_prompt_k_times_and_tries_failures_again() -> None:
    episodes = Episodes()
    metrics, count = run(episodes)
    assert (count, metrics["trajectory/failed"]) == (6, 0)
    assert metrics["reward/mean"] == pytest.approx(1 / 3)
    assert metrics["reward/answered"] == 1.0
    assert episodes.temperatures == {0.5}
    assert episodes.most_running == 3
    assert sorted(episodes.attempts.values()) == [1, 1, 1, 1, 3, 3]


def test_named_sets_are_evaluated_in_turn_each_in_its_own_way() -> None:
    episodes = Episodes()
    sets = [HeldOut("easy", PROMPTS[:1], 3, 0.0), HeldOut("hard", PROMPTS[1:2], 1, None)]
    metrics, count = asyncio.run(evaluate_sets(episodes, sets, concurrency=2, pass_threshold=0.5, name="x"))
    assert count == 4
    assert (metrics["easy/reward/mean"], metrics["hard/reward/mean"]) == (1.0, 0.0)
    assert next(name for name in metrics if name.endswith("/reward/mean")) == "easy/reward/mean"
    assert episodes.temperatures == {0.0, None}
    assert {name.rsplit("-", 2)[0] for name in episodes.attempts} == {"eval-x-easy", "eval-x-hard"}


def test_what_cannot_be_scored_is_counted_and_left_out() -> None:
    metrics, count = run(Episodes(always_broken=True))
    assert (count, metrics["trajectory/failed"], metrics["reward/mean"]) == (4, 2, 0.5)


def test_an_evaluation_without_any_score_is_an_error_with_the_last_reason() -> None:
    with pytest.raises(RolloutEnded, match=r"none of 2 trajectories could be scored; .*'broken'.*no answer"):
        run(Episodes(always_broken=True), PROMPTS[2:])


def test_an_agent_that_raises_something_of_its_own_costs_its_trajectory_alone() -> None:
    class Buggy(Episodes):
        async def run(self, prompt: Prompt, **names: Any) -> Trajectory:
            if prompt.id == "hard":
                raise ValueError("a bug of the agent")
            return await super().run(prompt, **names)

    metrics, count = run(Buggy())
    assert (count, metrics["trajectory/failed"]) == (4, 2)


def test_an_evaluation_in_which_nothing_works_ends_after_a_few_prompts_and_a_time_limit_is_not_tried_again() -> None:
    class Hanging(Episodes):
        async def run(self, prompt: Prompt, **names: Any) -> Trajectory:
            self.attempts[names["trajectory_id"]] = self.attempts.get(names["trajectory_id"], 0) + 1
            await asyncio.sleep(0)
            raise AgentTimeoutError("the agent took longer than agent.timeout_s=1")

    episodes = Hanging()
    with pytest.raises(RolloutEnded, match=r"the first 8 prompts all failed; .*agent.timeout_s=1"):
        run(episodes, [Prompt(f"p{i}", ()) for i in range(100)])
    assert set(episodes.attempts.values()) == {1}
    assert len(episodes.attempts) < 30


def test_an_evaluation_that_stands_still_says_what_its_trajectories_wait_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Episodes):
        async def run(self, prompt: Prompt, **names: Any) -> Trajectory:
            await asyncio.sleep(0.4)
            return await super().run(prompt, **names)

    monkeypatch.setattr(watchdog, "_STUCK_S", 0.1)
    run(Slow(), PROMPTS[:2])
    assert "no trajectory of evaluation 'x' has ended for 0 s: 3 wait for agent code at" in caplog.text
    assert "1 wait for its turn" in caplog.text


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
