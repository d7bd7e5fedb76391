"""From the configured algorithm to the loss of one micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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

#: Largest rounding of an own advantage function's values, relative to the largest reward; above it they are a signal.
_NO_SIGNAL = 1e-9


@dataclass(frozen=True)
class ContextGroup:
    """The context-parallel ranks that hold parts of the same trajectories (``models/layers/zigzag.py``)."""

    group: dist.ProcessGroup

    def sum(self, values: Tensor) -> Tensor:
        """Add ``values`` over the parts, without gradient: so the losses see whole trajectories."""
        total = values.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def failure_mask(
        self, entropy: Tensor, action_mask: Tensor, positions: Tensor, failed: Tensor, quantile: float
    ) -> Tensor:
        """This rank's part of :func:`failure_token_mask`, from its parts ``[b, W]``; every rank has the same ``W``.

        Equal entropies are ordered by their position in the whole trajectory.
        """
        whole = [self._gather(t) for t in (entropy, action_mask.to(torch.uint8), positions)]
        order = whole[2].argsort(dim=1, stable=True)
        ordered = failure_token_mask(whole[0].gather(1, order), whole[1].gather(1, order).bool(), failed, quantile)
        keep = torch.empty_like(ordered).scatter_(1, order, ordered)
        return keep.chunk(dist.get_world_size(self.group), dim=1)[dist.get_rank(self.group)]

    def _gather(self, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)


@dataclass(frozen=True)
class BatchConstants:
    """Sizes of the whole update's batch, over all ranks."""

    batch_size: int  # B
    action_tokens: int


class Objective:
    """The loss that ``config`` names; ``context`` is None where each rank holds whole trajectories.

    Raises:
        ConfigError: an advantage or a loss of the user's own cannot be imported.
    """

    def __init__(self, config: AlgorithmConfig, context: ContextGroup | None = None) -> None:
        self._config, self._context = config, context
        self._advantage: Any = "group" if isinstance(config, GRPOConfig) else config.advantage
        if ":" in self._advantage:
            self._advantage = import_object(self._advantage, "algorithm.advantage")
        #: Metrics of a gate that the algorithm does not have.
        self.without: tuple[str, ...] = ()
        gate = "off" if isinstance(config, GRPOConfig) else getattr(config, "admission", "")
        if gate == "off":
            self.without = ("trust_region/admitted", "trust_region/admitted_tokens")
        elif gate == "token":
            self.without = ("trust_region/admitted",)
        #: Optimizer steps on a batch.
        self.steps = config.steps if isinstance(config, GRPOConfig) else 1
        #: Whether the loss is the user's own, which may return statistics of its own.
        self.own = isinstance(config, OwnLossConfig)
        self._loss: Any = import_object(config.loss, "algorithm.loss") if isinstance(config, OwnLossConfig) else None

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
        self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor, constants: BatchConstants
    ) -> tuple[Tensor, LossStats, dict[str, Tensor]]:
        """This micro-batch's part of the update's loss, its statistics, and those of the user's own loss.

        ``logprobs`` of the targets and ``entropy`` are float32 ``[r, c]``; only the first has a gradient.

        Raises:
            FloatingPointError: a log-probability or an importance ratio is not finite.
            UpdateError: the user's own loss raised, or returned something unusable.
        """
        config, mask = self._config, batch.trajectory_mask
        common: dict[str, Any] = {
            "logprobs": batch.by_trajectory(logprobs),
            "behavior_logprobs": batch.by_trajectory(batch.behavior_logprobs),
            "advantages": batch.advantages,
            "action_mask": mask,
            "batch_size": constants.batch_size,
            "sum_over_context": None if self._context is None else self._context.sum,
        }
        if isinstance(config, OwnLossConfig):
            with _users_code("algorithm.loss"):
                return own_loss(
                    self._loss,
                    config.loss_args,
                    **common,
                    entropy=batch.by_trajectory(entropy),
                    versions=batch.by_trajectory(batch.versions),
                    batch_action_tokens=constants.action_tokens,
                )
        if isinstance(config, GRPOConfig):
            loss, stats = grpo_loss(
                **common,
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                old_logprobs=None if batch.old_logprobs is None else batch.by_trajectory(batch.old_logprobs),
                batch_action_tokens=constants.action_tokens if config.reduction == "token_mean" else None,
            )
            return loss, stats, {}
        keep: Tensor | None = None
        if config.failure_token_quantile != 1:
            filtered = batch.by_trajectory(entropy), mask
            failed = batch.rewards <= config.failure_threshold
            if self._context is None:
                keep = failure_token_mask(*filtered, failed, config.failure_token_quantile)
            else:
                positions = batch.by_trajectory(batch.position_ids)
                keep = self._context.failure_mask(*filtered, positions, failed, config.failure_token_quantile)
        loss, stats = flash_reinforce_loss(
            **common,
            delta=config.delta,
            reduction=config.reduction,
            admission=config.admission,
            importance=config.importance,
            truncation=config.truncation,
            loss_mask=keep,
            batch_action_tokens=constants.action_tokens if config.reduction == "token_mean" else None,
        )
        return loss, stats, {}


@contextmanager
def _users_code(field: str) -> Iterator[None]:
    """Turn what the user's function raises into an error of the update that names file and line."""
    try:
        yield
    except FloatingPointError:
        raise
    except Exception as error:  # the function may raise anything
        raise UpdateError(f"{field}: {type(error).__name__}: {error} ({place_of(error)})") from error
