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
from megatron_fr.trainer.batch import MicroBatch


@dataclass(frozen=True)
class BatchConstants:
    """What every micro-batch's loss needs to know of the whole update, over all ranks."""

    batch_size: int  # B
    action_tokens: int


class Objective:
    """The loss that ``config`` names."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config

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
            logprobs: float32 ``[b, P]``, of ``batch.targets``.
            entropy: float32 ``[b, P]``, without gradient.
        """
        config = self._config
        if not isinstance(config, FlashReinforceConfig):
            return grpo_loss(
                logprobs,
                batch.behavior_logprobs,
                batch.advantages,
                batch.action_mask,
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                batch_size=constants.batch_size,
            )
        keep = None
        if config.failure_token_quantile < 1:
            keep = failure_token_mask(entropy, batch.action_mask, batch.advantages, config.failure_token_quantile)
        return flash_reinforce_loss(
            logprobs,
            batch.behavior_logprobs,
            batch.advantages,
            batch.action_mask,
            delta=config.delta,
            batch_size=constants.batch_size,
            reduction=config.reduction,
            admission=config.admission,
            importance=config.importance,
            truncation=config.truncation,
            loss_mask=keep,
            batch_action_tokens=constants.action_tokens if config.reduction == "token_mean" else None,
        )
