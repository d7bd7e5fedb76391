"""The staleness gate: how many rollouts may exist beyond what the trainer has consumed. Pure counting."""

from __future__ import annotations


class StalenessGate:
    """A rollout starts only while ``started - failed - dropped < (consumed_batches + max_policy_lag + 1) * B``.

    All counts run from the run's beginning. A rollout that is tried again counts as failed and as started once more.

    Args:
        batch_size: ``B``, trajectories a batch.
        max_policy_lag: updates that may lie between sampling and training.
    """

    def __init__(self, batch_size: int, max_policy_lag: int) -> None:
        self._batch_size = batch_size
        self._max_policy_lag = max_policy_lag
        self.started = 0
        self.failed = 0
        self.dropped = 0
        self.consumed_batches = 0

    @property
    def live(self) -> int:
        """Rollouts that were started and may still reach, or have reached, a batch."""
        return self.started - self.failed - self.dropped

    @property
    def limit(self) -> int:
        """The bound on :attr:`live` at this moment."""
        return (self.consumed_batches + self._max_policy_lag + 1) * self._batch_size

    def may_start(self, count: int = 1) -> bool:
        """Whether ``count`` more rollouts (those of one group) may start together."""
        return self.live + count <= self.limit

    def start(self, count: int = 1) -> None:
        """Count rollouts that begin."""
        self.started += count

    def fail(self, count: int = 1) -> None:
        """Count rollouts that ended without a trajectory."""
        self.failed += count

    def drop(self, count: int = 1) -> None:
        """Count rollouts whose trajectory is thrown away."""
        self.dropped += count

    def commit(self) -> None:
        """A batch was consumed, with or without an optimizer step."""
        self.consumed_batches += 1
