"""Finished trajectories on their way to the trainer: batches in order of arrival, leased and then committed."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_fr.errors import RolloutEnded, TrajectoryError
from megatron_fr.trajectory import ModelLimits, Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeasedBatch:
    """The trajectories of one update, with their lags: the leasing version minus the oldest of an action token."""

    batch_id: str
    trajectories: tuple[Trajectory, ...]
    lags: tuple[int, ...]


@dataclass(kw_only=True)
class TrajectoryQueue:
    """In memory. A unit is a complete group: ``group_size`` rollouts of one prompt. ``batch_size`` is a multiple of it.

    A lease is exclusive until it is committed. The next :meth:`lease` hands a lease that was never committed (the
    trainer died) out again. A lease drops units with an action token older than ``max_policy_lag`` versions, and calls
    ``on_drop`` with the number of their trajectories.
    """

    batch_size: int
    group_size: int
    max_policy_lag: int
    limits: ModelLimits
    on_drop: Callable[[int], None]
    _ready: deque[tuple[Trajectory, ...]] = field(default_factory=deque, init=False)
    _partial: dict[str, list[Trajectory]] = field(default_factory=dict, init=False)
    _leased: LeasedBatch | None = field(default=None, init=False)
    _committed: str | None = field(default=None, init=False)
    _next_batch: int = field(default=0, init=False)

    @property
    def queued(self) -> int:
        """Trajectories that wait for a lease, members of incomplete groups included."""
        return sum(map(len, self._ready)) + sum(map(len, self._partial.values()))

    def put(self, trajectory: Trajectory) -> None:
        """Add a finished trajectory. Routes that cannot be replayed are taken off it, with the reason.

        Raises:
            TrajectoryError: it breaks the contract and was not added.
        """
        if trajectory.routed_experts is not None and (reason := trajectory.check_routes(self.limits)) is not None:
            trajectory.routed_experts, trajectory.route_error = None, reason
        if trajectory.route_error is not None:
            log.warning("trajectory %s: routes dropped: %s", trajectory.id, trajectory.route_error)
        trajectory.validate(self.limits)
        members = self._partial.setdefault(trajectory.group_id, [])
        members.append(trajectory)
        if len(members) == self.group_size:
            self._ready.append(tuple(self._partial.pop(trajectory.group_id)))

    def discard_group(self, group_id: str) -> None:
        """Drop the finished members of a group that will never be complete."""
        if members := self._partial.pop(group_id, []):
            self.on_drop(len(members))

    def lease(self, version: int) -> LeasedBatch | None:
        """The next batch for an update of policy ``version``, or None while there is no full one."""
        again = self._leased
        if again is not None:
            self._ready.extendleft(reversed(self._units(again.trajectories)))
            self._leased = None
        self._drop_stale(version)
        units_per_batch = self.batch_size // self.group_size
        if len(self._ready) < units_per_batch:
            return None
        trajectories = tuple(t for _ in range(units_per_batch) for t in self._ready.popleft())
        if again is not None and _ids(trajectories) == _ids(again.trajectories):
            batch_id = again.batch_id
        else:
            batch_id, self._next_batch = f"batch-{self._next_batch:06d}", self._next_batch + 1
        self._leased = LeasedBatch(batch_id, trajectories, tuple(version - t.oldest_version for t in trajectories))
        return self._leased

    def fetch(self, ids: Sequence[str]) -> list[Trajectory]:
        """Trajectories of the leased batch, in the order of ``ids``; TrajectoryError where one is not in it."""
        leased = {t.id: t for t in self._leased.trajectories} if self._leased else {}
        if missing := [i for i in ids if i not in leased]:
            raise TrajectoryError(f"trajectories {', '.join(missing)} are not in the leased batch")
        return [leased[i] for i in ids]

    def commit(self, batch_id: str) -> bool:
        """Forget the leased batch; False when this was committed already (an answer got lost), else RolloutEnded."""
        leased = self._leased.batch_id if self._leased else "none"
        if self._leased is not None and leased == batch_id:
            self._leased, self._committed = None, batch_id
            return True
        if batch_id == self._committed:
            return False
        raise RolloutEnded(f"commit of {batch_id!r}, but the leased batch is {leased}; lease again")

    def snapshot(self) -> tuple[list[Trajectory], list[Trajectory], int]:
        """``(ready, partial, next_batch)``: complete units in order, an uncommitted lease first; the members of
        incomplete groups; the next batch's number."""
        leased = self._leased.trajectories if self._leased else ()
        ready = [*leased, *(t for unit in self._ready for t in unit)]
        return ready, [t for members in self._partial.values() for t in members], self._next_batch

    def restore(self, ready: Sequence[Trajectory], partial: Sequence[Trajectory], next_batch: int) -> None:
        """Put a :meth:`snapshot` into a new queue; TrajectoryError where one does not fit the model."""
        for trajectory in (*ready, *partial):
            trajectory.validate(self.limits)
        self._ready.extend(self._units(ready))
        for trajectory in partial:
            self._partial.setdefault(trajectory.group_id, []).append(trajectory)
        self._next_batch = next_batch

    def _units(self, trajectories: Sequence[Trajectory]) -> list[tuple[Trajectory, ...]]:
        n = self.group_size
        return [tuple(trajectories[i : i + n]) for i in range(0, len(trajectories), n)]

    def _drop_stale(self, version: int) -> None:
        for _ in range(len(self._ready)):
            unit = self._ready.popleft()
            lag = version - min(t.oldest_version for t in unit)
            if lag <= self.max_policy_lag:
                self._ready.append(unit)
                continue
            names = ", ".join(_ids(unit))
            log.warning("dropped %s: %d versions old, rollout.max_policy_lag=%d", names, lag, self.max_policy_lag)
            self.on_drop(len(unit))


def _ids(trajectories: Sequence[Trajectory]) -> list[str]:
    return [t.id for t in trajectories]
