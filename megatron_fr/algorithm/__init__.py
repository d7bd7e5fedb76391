"""The method in pure torch: advantages, trust region, losses. Imports nothing else of this package."""

from megatron_fr.algorithm.advantage import RewardBatch, batch_mean_advantages, compute_advantages, has_signal
from megatron_fr.algorithm.failure_filter import failure_token_mask
from megatron_fr.algorithm.grpo import grpo_loss
from megatron_fr.algorithm.loss import flash_reinforce_loss
from megatron_fr.algorithm.own_loss import LossInput, own_loss
from megatron_fr.algorithm.stats import LossStats

__all__ = [
    "LossInput",
    "LossStats",
    "RewardBatch",
    "batch_mean_advantages",
    "compute_advantages",
    "failure_token_mask",
    "flash_reinforce_loss",
    "grpo_loss",
    "has_signal",
    "own_loss",
]
