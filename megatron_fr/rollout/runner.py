"""The pool of concurrent trajectories: gate, prompt, agent, reward, queue."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from megatron_fr.agents.contract import Prompt
from megatron_fr.agents.rewards import FatalRewardError
from megatron_fr.errors import MegatronFRError, RolloutEnded, TrajectoryError
from megatron_fr.rollout.episode import EpisodeRunner
from megatron_fr.rollout.queue import TrajectoryQueue
from megatron_fr.rollout.staleness import StalenessGate

log = logging.getLogger(__name__)

#: Attempts of one member of a group (or of a single rollout) before its prompt is given up.
MAX_ATTEMPTS = 3
#: Failures with no success between them, per runner, after which the run cannot go on.
_FAILURES_PER_RUNNER = 3
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


class RunnerPool:
    """Keeps up to ``runners`` trajectories going while the gate allows it.

    Args:
        episodes: runs one episode.
        prompts: endless.
        runners: concurrent trajectories.
        group_size: rollouts of one prompt, let in together.
        on_fatal: called once with the reason when the run cannot go on.

    Attributes:
        in_flight: trajectories under way.
        finished: trajectories that have reached the queue.
        refused: trajectories that the queue or the episode refused.
    """

    def __init__(
        self,
        episodes: EpisodeRunner,
        prompts: Iterator[Prompt],
        gate: StalenessGate,
        queue: TrajectoryQueue,
        *,
        runners: int,
        group_size: int,
        on_fatal: Callable[[MegatronFRError], None],
    ) -> None:
        self._episodes = episodes
        self._prompts = prompts
        self._gate = gate
        self._queue = queue
        self._runners = runners
        self._group_size = group_size
        self._on_fatal = on_fatal
        self._waiting: deque[Member] = deque()
        self._running: list[Member] = []
        self._opened = asyncio.Event()
        self._arrived = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._groups = 0
        self._failures_in_a_row = 0
        self.in_flight = 0
        self.finished = 0
        self.refused = 0

    def start(self) -> None:
        """Begin; needs a running event loop. A second call does nothing."""
        if self._tasks:
            return
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
        """The gate may have opened."""
        self._opened.set()

    async def wait_arrival(self, seen: int) -> None:
        """Return once :attr:`finished` is above ``seen``, its value when the queue was last looked at."""
        while self.finished <= seen:
            self._arrived.clear()
            await self._arrived.wait()

    async def _work(self) -> None:
        while True:
            member = await self._next()
            self.in_flight += 1
            try:
                await self._run(member)
            except MegatronFRError as error:
                self._on_fatal(error)
                return
            finally:
                self.in_flight -= 1

    async def _next(self) -> Member:
        while not self._waiting:
            if self._gate.may_start(self._group_size):
                self._open_group()
            else:
                self._opened.clear()
                await self._opened.wait()
        return self._waiting.popleft()

    def _open_group(self) -> None:
        group = Group(f"{self._groups:06d}", next(self._prompts))
        self._groups += 1
        self._gate.start(self._group_size)
        self._waiting += [Member(group, index) for index in range(self._group_size)]
        self.wake()

    async def _run(self, member: Member) -> None:
        """Run one member; raises only what must end the run."""
        trajectory_id = member.group.id
        if self._group_size > 1:
            trajectory_id += f"-{member.index}"
        if member.attempt:
            trajectory_id += f"-retry{member.attempt}"
        try:
            # Nothing is awaited between the end of this and the queue or the next attempt, so that a snapshot finds
            # every rollout in exactly one place.
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
                self._gate.drop()
                self.wake()
                return
            self._queue.put(trajectory)
        except FatalRewardError:
            raise
        except TrajectoryError as error:
            self.refused += 1
            self._failed(member, trajectory_id, error, retry=self._group_size > 1)
        except Exception as error:  # an agent is the user's code; one bad rollout must not end the others
            if not isinstance(error, MegatronFRError):
                log.exception("trajectory %s: unexpected error in the agent", trajectory_id)
            self._failed(member, trajectory_id, error, retry=True)
            await asyncio.sleep(_BACKOFF_S)
        else:
            self.finished += 1
            self._failures_in_a_row = 0
            self._arrived.set()

    def _failed(self, member: Member, trajectory_id: str, error: Exception, *, retry: bool) -> None:
        group = member.group
        self._gate.fail()
        self._failures_in_a_row += 1
        retry = retry and group.alive and member.attempt + 1 < MAX_ATTEMPTS
        log.warning(
            "trajectory %s (prompt %r, attempt %d) failed%s: %s: %s",
            trajectory_id,
            group.prompt.id,
            member.attempt + 1,
            "; it is tried again" if retry else "",
            type(error).__name__,
            error,
        )
        if self._failures_in_a_row >= _FAILURES_PER_RUNNER * self._runners:
            raise RolloutEnded(
                f"{self._failures_in_a_row} trajectories failed in a row; the last one, {trajectory_id}: "
                f"{type(error).__name__}: {error}"
            )
        if retry:
            self._gate.start()
            self._waiting.append(Member(group, member.index, member.attempt + 1))
        elif group.alive:
            self._give_up(group)
        self.wake()

    def _give_up(self, group: Group) -> None:
        """The group will never be complete: drop what it has, and what it still has to run."""
        group.alive = False
        self._queue.discard_group(group.id)
        waiting = [m for m in self._waiting if m.group is group]
        self._waiting = deque(m for m in self._waiting if m.group is not group)
        if waiting:
            self._gate.drop(len(waiting))
        if self._group_size > 1:
            log.warning("group %s (prompt %r) is given up", group.id, group.prompt.id)
