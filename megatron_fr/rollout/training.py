"""The rollouts that make training batches: prompts, staleness gate, runner pool and queue, wired and saved together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_fr.agents.contract import Prompt
from megatron_fr.config import RunConfig
from megatron_fr.errors import CheckpointError, MegatronFRError, TrajectoryError
from megatron_fr.rollout.episode import EpisodeRunner
from megatron_fr.rollout.prompts import PromptCursor
from megatron_fr.rollout.queue import TrajectoryQueue
from megatron_fr.rollout.runner import RunnerPool, Unfinished
from megatron_fr.rollout.staleness import StalenessGate
from megatron_fr.rollout.state import Counters, RolloutState, describe_prompts
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
        self._source = describe_prompts(prompts, config.seed, config.data.shuffle)

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

    def snapshot(self, version: int) -> RolloutState:
        """The state now; call it in the event loop's thread. Payloads are shared, not copied."""
        unfinished, doomed, groups = self.pool.snapshot()
        ready, partial, next_batch = self.queue.snapshot()
        return RolloutState(
            counters=Counters(
                version=version,
                cursor=self.cursor.position,
                consumed_batches=self.gate.consumed_batches,
                started=self.gate.started,
                failed=self.gate.failed,
                dropped=self.gate.dropped + doomed,
                groups=groups,
                next_batch=next_batch,
                finished=self.pool.finished,
                refused=self.pool.refused,
            ),
            unfinished=[
                {"group_id": u.group_id, "prompt_id": u.prompt.id, "index": u.index, "attempt": u.attempt}
                for u in unfinished
            ],
            prompts=self._source,
            ready=ready,
            partial=partial,
        )

    def restore(self, state: RolloutState) -> None:
        """Go on from ``state``; nothing runs yet.

        Raises:
            CheckpointError: the prompts are others than they were, or a trajectory does not fit the model.
        """
        changed = [
            f"{name}: {state.prompts.get(name)!r} then, {value!r} now"
            for name, value in self._source.items()
            if state.prompts.get(name) != value
        ]
        if changed:
            raise CheckpointError(
                f"the checkpoint was made with other prompts ({'; '.join(changed)}); restore data.train, seed and "
                "data.shuffle, or start anew with checkpoint.resume=never"
            )
        counters = state.counters
        by_id = {prompt.id: prompt for prompt in self.prompts}
        self.cursor.seek(counters.cursor)
        for name in ("consumed_batches", "started", "failed", "dropped"):
            setattr(self.gate, name, getattr(counters, name))
        try:
            self.queue.restore(state.ready, state.partial, counters.next_batch)
        except TrajectoryError as error:
            raise CheckpointError(f"the checkpoint's trajectories do not fit this run: {error}") from error
        self.pool.restore(
            [Unfinished(u["group_id"], by_id[u["prompt_id"]], u["index"], u["attempt"]) for u in state.unfinished],
            counters.groups,
        )
        self.pool.finished, self.pool.refused = counters.finished, counters.refused

    def _drop(self, count: int) -> None:
        self.gate.drop(count)
        self.pool.wake()
