"""Finished trajectories on their way to the trainer: batches in order of arrival, leased and then committed."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_fr.errors import RolloutEnded, TrajectoryError
from megatron_fr.trajectory import ModelLimits, Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeasedBatch:
    """``B`` trajectories leased for one update.

    ``lags[i]`` is the leasing version minus the oldest version among that trajectory's action tokens.
    """

    batch_id: str
    trajectories: tuple[Trajectory, ...]
    lags: tuple[int, ...]


class TrajectoryQueue:
    """In memory. A unit is a trajectory, or with ``group_size`` above 1 a complete group.

    A lease is exclusive until it is committed. A lease that was never committed (the trainer died) is handed out again
    with the next :meth:`lease`, at the head of the queue.

    Args:
        batch_size: ``B``.
        group_size: rollouts of one prompt; divides ``batch_size``.
        max_policy_lag: units with an older action token than this many versions are dropped when leasing.
        limits: what a valid trajectory may contain.
        on_drop: called with the number of trajectories that were dropped.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        group_size: int,
        max_policy_lag: int,
        limits: ModelLimits,
        on_drop: Callable[[int], None],
    ) -> None:
        self._units_per_batch = batch_size // group_size
        self._group_size = group_size
        self._max_policy_lag = max_policy_lag
        self._limits = limits
        self._on_drop = on_drop
        self._ready: deque[tuple[Trajectory, ...]] = deque()
        self._partial: dict[str, list[Trajectory]] = {}
        self._leased: LeasedBatch | None = None
        self._committed: str | None = None
        self._next_batch = 0

    @property
    def queued(self) -> int:
        """Trajectories that wait for a lease, members of incomplete groups included."""
        return sum(map(len, self._ready)) + sum(map(len, self._partial.values()))

    def put(self, trajectory: Trajectory) -> None:
        """Add a finished trajectory. Routes that cannot be replayed are taken off it, with the reason.

        Raises:
            TrajectoryError: it breaks the contract and was not added.
        """
        if trajectory.routed_experts is not None and (reason := trajectory.check_routes(self._limits)) is not None:
            trajectory.routed_experts, trajectory.route_error = None, reason
        if trajectory.route_error is not None:
            log.warning("trajectory %s: routes dropped: %s", trajectory.id, trajectory.route_error)
        trajectory.validate(self._limits)
        if self._group_size == 1:
            self._ready.append((trajectory,))
            return
        members = self._partial.setdefault(trajectory.group_id, [])
        members.append(trajectory)
        if len(members) == self._group_size:
            self._ready.append(tuple(self._partial.pop(trajectory.group_id)))

    def discard_group(self, group_id: str) -> None:
        """Drop the finished members of a group that will never be complete."""
        members = self._partial.pop(group_id, [])
        if members:
            self._on_drop(len(members))

    def lease(self, version: int) -> LeasedBatch | None:
        """The next batch for an update of policy ``version``, or None while there is no full one."""
        again = self._leased
        if again is not None:
            self._ready.extendleft(reversed(self._units(again.trajectories)))
            self._leased = None
        self._drop_stale(version)
        if len(self._ready) < self._units_per_batch:
            return None
        trajectories = tuple(t for _ in range(self._units_per_batch) for t in self._ready.popleft())
        if again is not None and _ids(trajectories) == _ids(again.trajectories):
            batch_id = again.batch_id
        else:
            batch_id, self._next_batch = f"batch-{self._next_batch:06d}", self._next_batch + 1
        self._leased = LeasedBatch(batch_id, trajectories, tuple(version - t.oldest_version for t in trajectories))
        return self._leased

    def fetch(self, ids: Sequence[str]) -> list[Trajectory]:
        """Payloads of the leased batch, in the order of ``ids``.

        Raises:
            TrajectoryError: an id is not in the leased batch.
        """
        leased = {t.id: t for t in self._leased.trajectories} if self._leased else {}
        missing = [i for i in ids if i not in leased]
        if missing:
            raise TrajectoryError(f"trajectories {', '.join(missing)} are not in the leased batch")
        return [leased[i] for i in ids]

    def commit(self, batch_id: str) -> bool:
        """Forget a leased batch; False when it was committed already (an answer that got lost).

        Raises:
            RolloutEnded: no such batch is leased.
        """
        if self._leased is not None and self._leased.batch_id == batch_id:
            self._leased, self._committed = None, batch_id
            return True
        if batch_id == self._committed:
            return False
        leased = self._leased.batch_id if self._leased else "none"
        raise RolloutEnded(f"commit of {batch_id!r}, but the leased batch is {leased}; lease again")

    def snapshot(self) -> tuple[list[Trajectory], list[Trajectory], int]:
        """``(ready, partial, next_batch)``: complete units in order with a lease that is not committed at the head,
        the members of incomplete groups, and the next batch's number."""
        leased = self._leased.trajectories if self._leased else ()
        ready = [*leased, *(t for unit in self._ready for t in unit)]
        return ready, [t for members in self._partial.values() for t in members], self._next_batch

    def restore(self, ready: Sequence[Trajectory], partial: Sequence[Trajectory], next_batch: int) -> None:
        """Put a :meth:`snapshot` into a new queue.

        Raises:
            TrajectoryError: one of them does not fit the model.
        """
        for trajectory in (*ready, *partial):
            trajectory.validate(self._limits)
        self._ready.extend(self._units(ready))
        for trajectory in partial:
            self._partial.setdefault(trajectory.group_id, []).append(trajectory)
        self._next_batch = next_batch

    def _units(self, trajectories: Sequence[Trajectory]) -> list[tuple[Trajectory, ...]]:
        n = self._group_size
        return [tuple(trajectories[i : i + n]) for i in range(0, len(trajectories), n)]

    def _drop_stale(self, version: int) -> None:
        kept: deque[tuple[Trajectory, ...]] = deque()
        for unit in self._ready:
            lag = version - min(t.oldest_version for t in unit)
            if lag <= self._max_policy_lag:
                kept.append(unit)
                continue
            log.warning(
                "dropped %s: %d versions old, rollout.max_policy_lag=%d",
                ", ".join(_ids(unit)),
                lag,
                self._max_policy_lag,
            )
            self._on_drop(len(unit))
        self._ready = kept


def _ids(trajectories: Sequence[Trajectory]) -> list[str]:
    return [t.id for t in trajectories]
