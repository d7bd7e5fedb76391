"""Queue depth is not lag: lag is what runs and waits over the batch size, as the real pool, gate and queue have it.

Rollouts and updates take simulated time: an event loop whose clock jumps to the next timer makes every run the same.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from megatron_fr.agents.contract import Prompt
from megatron_fr.rollout.failures import FailedPrompts
from megatron_fr.rollout.metrics import batch_metrics
from megatron_fr.rollout.queue import TrajectoryQueue
from megatron_fr.rollout.runner import RunnerPool
from megatron_fr.rollout.staleness import StalenessGate
from megatron_fr.trajectory import NO_VERSION, ModelLimits, Trajectory
from tests.support.samples import trajectory

LIMITS = ModelLimits(vocab_size=100, max_context=16)
BATCH = 8
WARM_UP, UPDATES = 30, 200


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Nothing is waited for: where the loop would sleep until its next timer, its clock jumps there."""

    def __init__(self) -> None:
        super().__init__(_JumpingSelector(self))
        self.now = 0.0

    def time(self) -> float:
        return self.now


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everything waits, and no timer is set"
        self._loop.now += timeout
        return super().select(0)


@dataclass
class Seen:
    """Of each update after the warm-up: its lags as reported, the ``lag/mean`` metric, and counts at its commit."""

    lags: list[tuple[int, ...]] = field(default_factory=list)
    metric: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)

    @property
    def depth_in_batches(self) -> float:
        """Mean number of trajectories in the queue over the batch size."""
        return float(np.mean(self.waiting)) / BATCH


def train(*, runners: int, update_s: float, max_policy_lag: int = 100, seed: int = 0) -> Seen:
    """Rollouts of 1 s on average (log-normal, so that some take much longer), updates of ``update_s``."""
    seen = Seen()
    durations = random.Random(seed)

    async def body() -> None:
        version = 0

        class Episodes:
            async def run(self, prompt: Prompt, *, trajectory_id: str, group_id: str, queued_s: float) -> Trajectory:
                """Weights may change between any two of the eight tokens, of which the policy samples four."""
                duration = durations.lognormvariate(-0.32, 0.8)
                versions = [NO_VERSION] * 4
                for _ in range(4):
                    versions.append(version)
                    await asyncio.sleep(duration / 4)
                acted = np.array(versions) != NO_VERSION
                return trajectory(
                    trajectory_id,
                    prompt_id=prompt.id,
                    tokens=np.ones(8, np.int32),
                    action_mask=acted,
                    behavior_logprobs=np.where(acted, -1, 0).astype(np.float32),
                    versions=np.array(versions, np.int32),
                )

        gate = StalenessGate(BATCH, max_policy_lag)
        queue = TrajectoryQueue(
            # The gate alone bounds what runs and waits here: where nothing is dropped, every lag is seen.
            batch_size=BATCH,
            group_size=1,
            max_policy_lag=10**6,
            limits=LIMITS,
            on_drop=gate.drop,
        )
        pool = RunnerPool(
            Episodes(),  # type: ignore[arg-type]
            (Prompt(f"p{i}", ()) for i in itertools.count()),
            gate,
            queue,
            runners=runners,
            failed=FailedPrompts(1.0, 1),
            on_fatal=pytest.fail,
        )
        pool.start()
        for update in range(WARM_UP + UPDATES):
            while (batch := queue.lease(version)) is None:
                await pool.wait_arrival(pool.finished)
            await asyncio.sleep(update_s)
            if update >= WARM_UP:
                oldest = [min(v for v in t.versions.tolist() if v != NO_VERSION) for t in batch.trajectories]
                assert batch.lags == tuple(version - v for v in oldest)
                seen.lags.append(batch.lags)
                seen.metric.append(batch_metrics(batch.trajectories, batch.lags)["policy_lag/mean"])
                seen.running.append(pool.in_flight)
                seen.waiting.append(queue.queued)
            version += 1
            queue.commit(batch.batch_id)
            gate.consumed_batches += 1
            pool.wake()
        await pool.stop()
        assert gate.failed == gate.dropped == 0

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(body())
    return seen


@pytest.mark.parametrize("runners", [4, 8, 24, 64])
def test_with_a_fast_trainer_lag_is_runners_over_batch_size_though_hardly_anything_waits(runners: int) -> None:
    seen = train(runners=runners, update_s=0.0)
    assert set(seen.running) == {runners}
    # What waits when a batch is complete is next to nothing. A trajectory is in flight while ``runners`` others finish,
    # hence for runners / B updates, and then waits for the last of its batch.
    assert seen.depth_in_batches < 0.02
    assert np.mean(seen.metric) == pytest.approx(runners / BATCH, rel=0.03)


@pytest.mark.parametrize(
    ("runners", "update_s", "max_policy_lag"),
    [
        (24, 0.2, 100),  # the trainer keeps up
        (8, 3.0, 2),  # the trainer is the bottleneck: the gate closes
        (8, 3.0, 6),
        (32, 1.0, 4),
        (64, 0.3, 6),
    ],
)
def test_lag_is_what_runs_and_waits_over_the_batch_size(runners: int, update_s: float, max_policy_lag: int) -> None:
    seen = train(runners=runners, update_s=update_s, max_policy_lag=max_policy_lag)
    predicted = np.mean(np.add(seen.running, seen.waiting)) / BATCH
    assert np.mean(seen.metric) == pytest.approx(predicted, rel=0.03)
    if update_s > 1:  # the gate is closed: all that it lets in besides the leased batch runs or waits
        assert np.add(seen.running, seen.waiting).tolist() == [max_policy_lag * BATCH] * UPDATES


def test_the_metric_of_a_batch_is_the_mean_of_what_its_trajectories_say() -> None:
    seen = train(runners=24, update_s=0.2)
    assert seen.metric == [pytest.approx(sum(lags) / BATCH) for lags in seen.lags]
    assert len({round(m, 3) for m in seen.metric}) > 10  # it is measured batch by batch, not a constant of the run


def test_queue_depth_says_little_about_lag() -> None:
    few, many = train(runners=8, update_s=0.0), train(runners=64, update_s=0.0)
    assert abs(few.depth_in_batches - many.depth_in_batches) < 0.02
    assert np.mean(many.metric) > 6 * np.mean(few.metric)
    # A closed gate: the queue holds what is not in flight, and lag is the bound whatever its depth.
    full, low = (train(runners=32, update_s=seconds, max_policy_lag=4) for seconds in (10.0, 0.25))
    assert full.depth_in_batches > 3 * low.depth_in_batches
    assert [np.mean(seen.metric) for seen in (full, low)] == [pytest.approx(4, rel=0.02)] * 2
