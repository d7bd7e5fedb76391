"""The rollouts that make training batches: prompts, staleness gate, runner pool and queue, wired together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_fr.agents.contract import Prompt
from megatron_fr.config import RunConfig
from megatron_fr.errors import MegatronFRError
from megatron_fr.rollout.cursor import PromptCursor
from megatron_fr.rollout.episode import EpisodeRunner
from megatron_fr.rollout.queue import TrajectoryQueue
from megatron_fr.rollout.runner import RunnerPool
from megatron_fr.rollout.staleness import StalenessGate
from megatron_fr.trajectory import ModelLimits


class TrainingRollouts:
    """One per service; nothing runs before ``pool.start()``.

    Args:
        prompts: at least one.
        limits: what a valid trajectory may contain.
        on_fatal: called once with the reason when the run cannot go on.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: Sequence[Prompt],
        episodes: EpisodeRunner,
        limits: ModelLimits,
        *,
        on_fatal: Callable[[MegatronFRError], None],
    ) -> None:
        batch_size, group_size = config.train.batch_size, config.algorithm.group_size
        self.prompts = prompts
        self.cursor = PromptCursor(prompts, config.seed, config.data.shuffle)
        self.gate = StalenessGate(batch_size, config.max_policy_lag)
        self.queue = TrajectoryQueue(
            batch_size=batch_size,
            group_size=group_size,
            max_policy_lag=config.max_policy_lag,
            limits=limits,
            on_drop=self._drop,
        )
        self.pool = RunnerPool(
            episodes,
            self.cursor,
            self.gate,
            self.queue,
            runners=config.rollout.max_concurrent_trajectories,
            group_size=group_size,
            on_fatal=on_fatal,
        )

    def commit(self, batch_id: str) -> bool:
        """Forget a leased batch and let the rollouts in that its use makes room for; False when that was done already.

        Raises:
            RolloutEnded: no such batch is leased.
        """
        if not self.queue.commit(batch_id):
            return False
        self.gate.commit()
        self.pool.wake()
        return True

    def _drop(self, count: int) -> None:
        self.gate.drop(count)
        self.pool.wake()
