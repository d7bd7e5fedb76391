"""The staleness gate: how many rollouts may exist beyond what the trainer has consumed. Pure counting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StalenessGate:
    """A rollout starts only while ``started - failed - dropped < (consumed_batches + max_policy_lag + 1) * B``.

    All counts run from the run's beginning. A rollout that is tried again counts as failed, and as started once more.
    ``batch_size`` is ``B``; ``max_policy_lag`` updates may lie between sampling and training.
    """

    batch_size: int
    max_policy_lag: int
    started: int = 0
    failed: int = 0  # ended without a trajectory
    dropped: int = 0  # trajectory thrown away
    consumed_batches: int = 0  # with or without an optimizer step

    @property
    def live(self) -> int:
        """Rollouts that were started and may still reach, or have reached, a batch."""
        return self.started - self.failed - self.dropped

    @property
    def limit(self) -> int:
        """The bound on :attr:`live` at this moment."""
        return (self.consumed_batches + self.max_policy_lag + 1) * self.batch_size

    def may_start(self, count: int = 1) -> bool:
        """Whether ``count`` more rollouts (those of one group) may start together."""
        return self.live + count <= self.limit

    def drop(self, count: int) -> None:
        """Count rollouts whose trajectory is thrown away."""
        self.dropped += count
