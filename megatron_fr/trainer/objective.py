"""From the configured algorithm to the loss of one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_fr.algorithm.advantage import compute_advantages, has_signal
from megatron_fr.algorithm.failure_filter import failure_token_mask
from megatron_fr.algorithm.grpo import grpo_loss
from megatron_fr.algorithm.loss import flash_reinforce_loss
from megatron_fr.algorithm.stats import LossStats
from megatron_fr.config import AlgorithmConfig, FlashReinforceConfig
from megatron_fr.trainer.data.batch import MicroBatch
from megatron_fr.trainer.data.context import ContextGroup


@dataclass(frozen=True)
class BatchConstants:
    """What every micro-batch's loss needs to know of the whole update, over all ranks."""

    batch_size: int  # B
    action_tokens: int


class Objective:
    """The loss that ``config`` names.

    Args:
        context: the ranks that hold parts of the same trajectories, None where each rank holds whole ones.
    """

    def __init__(self, config: AlgorithmConfig, context: ContextGroup | None = None) -> None:
        self._config = config
        self.context = context

    def advantages(self, rewards: Sequence[float], group_ids: Sequence[str]) -> tuple[list[float], bool]:
        """Advantages of the global batch, and whether it has any signal.

        Args:
            rewards: of all ``B`` trajectories.
            group_ids: of all ``B`` trajectories; used by group advantages only.
        """
        name = self._config.advantage if isinstance(self._config, FlashReinforceConfig) else "group"
        groups = list(group_ids) if name == "group" else None
        values = torch.tensor(list(rewards), dtype=torch.float64)
        # With the raw reward as the advantage equal rewards still push, unless they are all 0.
        signal = bool((values != 0).any()) if name == "none" else has_signal(values, groups)
        return compute_advantages(name, values, groups).tolist(), signal

    def loss(
        self, batch: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor, constants: BatchConstants
    ) -> tuple[torch.Tensor, LossStats]:
        """This micro-batch's part of the update's loss.

        Args:
            logprobs: float32 ``[r, c]``, of ``batch.targets``.
            entropy: float32 ``[r, c]``, without gradient.
        """
        config = self._config
        logprobs, behavior = batch.by_trajectory(logprobs), batch.by_trajectory(batch.behavior_logprobs)
        mask = batch.trajectory_mask
        over_context = None if self.context is None else self.context.sum
        if not isinstance(config, FlashReinforceConfig):
            return grpo_loss(
                logprobs,
                behavior,
                batch.advantages,
                mask,
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                batch_size=constants.batch_size,
                sum_over_context=over_context,
            )
        return flash_reinforce_loss(
            logprobs,
            behavior,
            batch.advantages,
            mask,
            delta=config.delta,
            batch_size=constants.batch_size,
            reduction=config.reduction,
            admission=config.admission,
            importance=config.importance,
            truncation=config.truncation,
            loss_mask=self._kept(batch, mask, batch.by_trajectory(entropy), config.failure_token_quantile),
            batch_action_tokens=constants.action_tokens if config.reduction == "token_mean" else None,
            sum_over_context=over_context,
        )

    def _kept(
        self, batch: MicroBatch, mask: torch.Tensor, entropy: torch.Tensor, quantile: float
    ) -> torch.Tensor | None:
        if quantile == 1:
            return None
        if self.context is None:
            return failure_token_mask(entropy, mask, batch.advantages, quantile)
        positions = batch.by_trajectory(batch.position_ids)
        return self.context.failure_mask(entropy, mask, positions, batch.advantages, quantile)
