"""The pool of concurrent trajectories: gate, prompt, agent, reward, queue."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fr.agents.contract import Prompt
from megatron_fr.config import RunConfig
from megatron_fr.errors import MegatronFRError, RolloutEnded, TrajectoryError
from megatron_fr.rollout.cursor import PromptCursor
from megatron_fr.rollout.failures import MAX_ATTEMPTS, FailedPrompts, worth_retrying
from megatron_fr.rollout.queue import TrajectoryQueue
from megatron_fr.rollout.session import EpisodeRunner
from megatron_fr.rollout.staleness import StalenessGate
from megatron_fr.rollout.watchdog import waits_for
from megatron_fr.trajectory import ModelLimits

log = logging.getLogger(__name__)

_BACKOFF_S = 0.5


@dataclass
class Group:
    """The rollouts of one prompt; one member with algorithms that use no groups."""

    id: str
    prompt: Prompt
    alive: bool = True


@dataclass
class Member:
    """One rollout that the gate has let in; after a restart it runs again from its prompt."""

    group: Group
    index: int
    attempt: int = 0
    since: float = field(default_factory=time.monotonic)  # when it was let in or failed
    task: asyncio.Task[Any] | None = field(default=None, compare=False)  # in which it runs


class RunnerPool:
    """Keeps up to ``runners`` trajectories going while the gate allows it. Rollouts of one prompt start together.

    ``prompts`` never ends. ``on_fatal`` is called with the reason when the run cannot go on. :attr:`finished` counts
    the trajectories that reached the queue, :attr:`refused` those that the queue or the episode refused.
    """

    def __init__(
        self,
        episodes: EpisodeRunner,
        prompts: Iterator[Prompt],
        gate: StalenessGate,
        queue: TrajectoryQueue,
        *,
        runners: int,
        failed: FailedPrompts,
        on_fatal: Callable[[MegatronFRError], None],
    ) -> None:
        self._episodes, self._prompts, self._gate, self._queue = episodes, prompts, gate, queue
        self._runners, self._group_size, self._on_fatal = runners, queue.group_size, on_fatal
        self._failed_prompts = failed
        self._waiting: deque[Member] = deque()
        self._running: list[Member] = []
        self._opened, self._arrived = asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._groups = 0
        self.finished = 0
        self.refused = 0

    @property
    def in_flight(self) -> int:
        """Trajectories under way."""
        return len(self._running)

    def waiting_for(self) -> dict[str, int]:
        """Number of trajectories under way by what they wait for, the most first."""
        return dict(Counter(waits_for(m.task) for m in self._running if m.task is not None).most_common())

    def start(self) -> None:
        """Begin, in the running event loop. A second call does nothing."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._work(), name=f"runner-{i}") for i in range(self._runners)]

    async def stop(self) -> None:
        """Cancel every trajectory and wait until all are gone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def snapshot(self) -> tuple[list[Member], int, int]:
        """``(unfinished, doomed, groups)``: rollouts to run again in order, how many others run for groups that were
        given up (they will be dropped), and how many groups were opened."""
        members = [*self._running, *self._waiting]
        alive = sorted((m for m in members if m.group.alive), key=lambda m: (m.group.id, m.index))
        return alive, len(members) - len(alive), self._groups

    def restore(self, unfinished: Sequence[Member], groups: int) -> None:
        """Put a :meth:`snapshot` into a pool that was not started; the gate has counted these rollouts already."""
        self._waiting.extend(unfinished)
        self._groups = groups

    def wake(self) -> None:
        """Look at the gate again."""
        self._opened.set()

    async def wait_arrival(self, seen: int) -> None:
        """Return once :attr:`finished` is above ``seen``, its value when the queue was last looked at."""
        while self.finished <= seen:
            self._arrived.clear()
            await self._arrived.wait()

    async def _work(self) -> None:
        try:
            while True:
                await self._run(await self._next())
        except MegatronFRError as error:
            self._on_fatal(error)

    async def _next(self) -> Member:
        while not self._waiting:
            if not self._gate.may_start(self._group_size):
                self._opened.clear()
                await self._opened.wait()
                continue
            group = Group(f"{self._groups:06d}", next(self._prompts))
            self._groups += 1
            self._gate.started += self._group_size
            self._waiting += [Member(group, index) for index in range(self._group_size)]
            self.wake()
        return self._waiting.popleft()

    async def _run(self, member: Member) -> None:
        """Run one member; raises only what must end the run."""
        index = f"-{member.index}" if self._group_size > 1 else ""
        retry = f"-retry{member.attempt}" if member.attempt else ""
        trajectory_id = f"{member.group.id}{index}{retry}"
        try:
            # Nothing is awaited between the end of this and the queue or the next attempt, so that a snapshot finds
            # every rollout in exactly one place.
            member.task = asyncio.current_task()
            self._running.append(member)
            try:
                trajectory = await self._episodes.run(
                    member.group.prompt,
                    trajectory_id=trajectory_id,
                    group_id=member.group.id,
                    queued_s=time.monotonic() - member.since,
                )
            finally:
                self._running.remove(member)
            if not member.group.alive:
                self._gate.drop(1)
                self.wake()
                return
            self._queue.put(trajectory)
        except RolloutEnded:
            raise
        except TrajectoryError as error:
            self.refused += 1
            self._failed(member, trajectory_id, error)
        except Exception as error:  # an agent is the user's code; one bad rollout must not end the others
            if not isinstance(error, MegatronFRError):
                log.exception("trajectory %s: unexpected error in the agent", trajectory_id)
            self._failed(member, trajectory_id, error)
            await asyncio.sleep(_BACKOFF_S)
        else:
            self.finished += 1
            self._failed_prompts.succeeded(member.group.prompt.id)
            self._arrived.set()

    def _failed(self, member: Member, trajectory_id: str, error: Exception) -> None:
        group, attempts, reason = member.group, member.attempt + 1, f"{type(error).__name__}: {error}"
        self._gate.failed += 1
        retry = worth_retrying(error) and group.alive and attempts < MAX_ATTEMPTS
        name = f"trajectory {trajectory_id} (prompt {group.prompt.id!r}, attempt {attempts})"
        log.warning("%s failed%s: %s", name, "; it is tried again" if retry else "", reason)
        if retry:
            self._gate.started += 1
            self._waiting.append(Member(group, member.index, attempts))
        elif group.alive:
            # The group will never be complete: drop what it has, and what it still has to run.
            group.alive = False
            self._queue.discard_group(group.id)
            kept = deque(m for m in self._waiting if m.group is not group)
            self._gate.drop(len(self._waiting) - len(kept))
            self._waiting = kept
            self._failed_prompts.failed(group.prompt.id, reason)
        self.wake()


class TrainingRollouts:
    """The rollouts of training batches: prompts, gate, queue and pool; nothing runs before ``pool.start()``."""

    def __init__(
        self,
        config: RunConfig,
        prompts: Sequence[Prompt],
        episodes: EpisodeRunner,
        limits: ModelLimits,
        on_fatal: Callable[[MegatronFRError], None],
    ) -> None:
        batch_size, lag = config.train.batch_size, config.max_policy_lag
        self.prompts = prompts
        self.failed = FailedPrompts(config.rollout.max_failure_rate, len(prompts), Path(config.output))
        self.cursor = PromptCursor(prompts, config.seed, config.data.shuffle, self.failed.reasons)
        self.gate = StalenessGate(batch_size, lag)
        self.queue = TrajectoryQueue(
            batch_size=batch_size,
            group_size=config.algorithm.group_size,
            max_policy_lag=lag,
            limits=limits,
            on_drop=self._drop,
        )
        runners = config.rollout.max_concurrent_trajectories
        self.pool = RunnerPool(
            episodes, self.cursor, self.gate, self.queue, runners=runners, failed=self.failed, on_fatal=on_fatal
        )

    def commit(self, batch_id: str) -> bool:
        """Commit the queue's lease (see :meth:`TrajectoryQueue.commit`) and let rollouts start in its place."""
        if not self.queue.commit(batch_id):
            return False
        self.gate.consumed_batches += 1
        self.pool.wake()
        return True

    def _drop(self, count: int) -> None:
        self.gate.drop(count)
        self.pool.wake()
