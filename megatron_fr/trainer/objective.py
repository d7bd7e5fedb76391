"""From the configured algorithm to the loss of one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron_fr.algorithm import (
    LossStats,
    RewardBatch,
    compute_advantages,
    failure_token_mask,
    flash_reinforce_loss,
    grpo_loss,
    has_signal,
    own_loss,
)
from megatron_fr.config import AlgorithmConfig, GRPOConfig, OwnLossConfig
from megatron_fr.errors import UpdateError
from megatron_fr.runtime.importing import import_object, place_of
from megatron_fr.trainer.data.batch import MicroBatch
from megatron_fr.trainer.data.context import ContextGroup

#: Of an advantage function's own values, relative to the largest reward: smaller ones are rounding, not signal.
_NO_SIGNAL = 1e-9


@dataclass(frozen=True)
class BatchConstants:
    """What every micro-batch's loss needs to know of the whole update, over all ranks."""

    batch_size: int  # B
    action_tokens: int


class Objective:
    """The loss that ``config`` names.

    Args:
        context: the ranks that hold parts of the same trajectories, None where each rank holds whole ones.

    Raises:
        ConfigError: an advantage or a loss of the user's own cannot be imported.
    """

    def __init__(self, config: AlgorithmConfig, context: ContextGroup | None = None) -> None:
        self._config = config
        self.context = context
        self._advantage: Any = "group" if isinstance(config, GRPOConfig) else config.advantage
        if ":" in self._advantage:
            self._advantage = import_object(self._advantage, "algorithm.advantage")
        self._own_loss: Callable[..., Any] | None = None
        if isinstance(config, OwnLossConfig):
            self._own_loss = import_object(config.loss, "algorithm.loss")

    @property
    def own(self) -> bool:
        """Whether the loss is the user's own, which may return statistics of its own."""
        return self._own_loss is not None

    def advantages(self, batch: RewardBatch) -> tuple[list[float], bool]:
        """Advantages of the global batch, and whether it has any signal.

        Raises:
            UpdateError: the user's own advantage function raised, or returned something unusable.
        """
        name, rewards = self._advantage, batch.rewards
        if not isinstance(name, str):
            with _users_code("algorithm.advantage"):
                values = compute_advantages(name, batch)
            return values.tolist(), bool(values.abs().max() > _NO_SIGNAL * rewards.abs().max())
        # With the raw reward as the advantage equal rewards still push, unless they are all 0.
        groups = batch.group_ids if name == "group" else None
        signal = bool((rewards != 0).any()) if name == "none" else has_signal(rewards, groups)
        return compute_advantages(name, batch).tolist(), signal

    def loss(
        self, batch: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor, constants: BatchConstants
    ) -> tuple[torch.Tensor, LossStats, dict[str, torch.Tensor]]:
        """This micro-batch's part of the update's loss, its statistics, and those of the user's own loss.

        Args:
            logprobs: float32 ``[r, c]``, of ``batch.targets``.
            entropy: float32 ``[r, c]``, without gradient.

        Raises:
            FloatingPointError: a log-probability or an importance ratio is not finite.
            UpdateError: the user's own loss raised, or returned something unusable.
        """
        config = self._config
        mask = batch.trajectory_mask
        common: dict[str, Any] = {
            "logprobs": batch.by_trajectory(logprobs),
            "behavior_logprobs": batch.by_trajectory(batch.behavior_logprobs),
            "advantages": batch.advantages,
            "action_mask": mask,
            "batch_size": constants.batch_size,
            "sum_over_context": None if self.context is None else self.context.sum,
        }
        if isinstance(config, OwnLossConfig):
            assert self._own_loss is not None
            with _users_code("algorithm.loss"):
                return own_loss(
                    self._own_loss,
                    config.loss_args,
                    **common,
                    entropy=batch.by_trajectory(entropy),
                    versions=batch.by_trajectory(batch.versions),
                    batch_action_tokens=constants.action_tokens,
                )
        if isinstance(config, GRPOConfig):
            return *grpo_loss(**common, clip_low=config.clip_low, clip_high=config.clip_high), {}
        loss, stats = flash_reinforce_loss(
            **common,
            delta=config.delta,
            reduction=config.reduction,
            admission=config.admission,
            importance=config.importance,
            truncation=config.truncation,
            loss_mask=self._kept(batch, mask, batch.by_trajectory(entropy), config.failure_token_quantile),
            batch_action_tokens=constants.action_tokens if config.reduction == "token_mean" else None,
        )
        return loss, stats, {}

    def _kept(
        self, batch: MicroBatch, mask: torch.Tensor, entropy: torch.Tensor, quantile: float
    ) -> torch.Tensor | None:
        if quantile == 1:
            return None
        if self.context is None:
            return failure_token_mask(entropy, mask, batch.advantages, quantile)
        positions = batch.by_trajectory(batch.position_ids)
        return self.context.failure_mask(entropy, mask, positions, batch.advantages, quantile)


@contextmanager
def _users_code(field: str) -> Iterator[None]:
    """Turn what the user's function raises into an error of the update that names its file and line."""
    try:
        yield
    except FloatingPointError:
        raise
    except Exception as error:  # the function may raise anything
        raise UpdateError(f"{field}: {type(error).__name__}: {error} ({place_of(error)})") from error
