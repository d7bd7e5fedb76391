"""Advantages: what a trajectory's reward is compared with. Pure functions of the whole global batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Added to a group's standard deviation, as GRPO implementations do; without it an all-equal group divides 0 by 0.
GROUP_STD_EPS = 1e-6


@dataclass(frozen=True)
class RewardBatch:
    """What an advantage function sees: all ``B`` trajectories of an update, over all ranks, in one order.

    The run fills every field; each has ``B`` entries.
    """

    rewards: Tensor  # float64, finite
    group_ids: Sequence[Hashable] | None = None  # equal for the rollouts of one prompt that started together
    action_tokens: Tensor | None = None  # int64, the tokens that the policy sampled (T_i)
    lags: Tensor | None = None  # int64, policy versions between the oldest action token and the update
    metadata: Sequence[Mapping[str, Any]] = ()  # further fields of the prompt's record
    info: Sequence[Mapping[str, Any]] = ()  # what the agent returned beside the conversation
    reward_parts: Sequence[Mapping[str, float]] = ()  # the named parts of the reward


#: Takes a batch and returns floating-point advantages ``[B]``.
AdvantageFn = Callable[[RewardBatch], Tensor]


def compute_advantages(advantage: str | AdvantageFn, batch: RewardBatch) -> Tensor:
    """Advantages of one global batch.

    Args:
        advantage: a key of :data:`ADVANTAGES`, or a function of the same kind.
        batch: rewards float32 or float64 ``[B]``; ``group`` needs ``group_ids`` too.

    Returns:
        ``[B]`` in the dtype of the rewards; the built-in ones compute in float64.

    Raises:
        ValueError: name, rewards or groups do not fit, or the function returns no ``B`` finite numbers.
        TypeError: rewards are not floating point.
    """
    _check_rewards(batch.rewards)
    rewards = batch.rewards.detach()
    if not isinstance(advantage, str):
        values = torch.as_tensor(advantage(batch)).detach()
        if values.shape != rewards.shape or not bool(values.isfinite().all()):
            raise ValueError(
                f"the advantage function returned {values.tolist()}; it must return {len(rewards)} finite numbers"
            )
        return values.to(rewards.dtype)
    if advantage not in ADVANTAGES:
        raise ValueError(f"advantage {advantage!r} is unknown; choose one of {', '.join(sorted(ADVANTAGES))}")
    return ADVANTAGES[advantage](RewardBatch(rewards.double(), batch.group_ids)).to(rewards.dtype)


def batch_mean_advantages(rewards: Tensor) -> Tensor:
    """``A_i = R_i - mean_j R_j`` of rewards float ``[B]``, all data-parallel ranks' (One-Batch REINFORCE)."""
    return compute_advantages("batch_mean", RewardBatch(rewards))


def has_signal(rewards: Tensor, group_ids: Sequence[Hashable] | None = None) -> bool:
    """Whether rewards differ; with ``group_ids``, whether they differ within some group."""
    _check_rewards(rewards)
    groups = [list(range(len(rewards)))] if group_ids is None else _groups(rewards, group_ids)
    return any(bool(rewards[rows].max() > rewards[rows].min()) for rows in groups)


def _batch_mean(batch: RewardBatch) -> Tensor:
    """``A_i = R_i - mean_j R_j``, no division by the standard deviation (One-Batch REINFORCE)."""
    return batch.rewards - batch.rewards.mean()


def _leave_one_out(batch: RewardBatch) -> Tensor:
    """``A_i = R_i - mean_{j != i} R_j``."""
    others = len(batch.rewards) - 1
    if others == 0:
        raise ValueError("advantage 'leave_one_out' of a batch of 1 has no other trajectory; raise train.batch_size")
    return batch.rewards - (batch.rewards.sum() - batch.rewards) / others


def _group(batch: RewardBatch) -> Tensor:
    """``A_i = (R_i - mean_g) / (std_g + eps)``, the sample standard deviation (``n - 1``) over the group (GRPO)."""
    if batch.group_ids is None:
        raise ValueError("advantage 'group' needs group_ids")
    advantages = torch.zeros_like(batch.rewards)
    for rows in _groups(batch.rewards, batch.group_ids):
        if len(rows) == 1:
            raise ValueError(f"group {batch.group_ids[rows[0]]!r} has one trajectory; groups need two or more")
        members = batch.rewards[rows]
        advantages[rows] = (members - members.mean()) / (members.std(correction=1) + GROUP_STD_EPS)
    return advantages


def _positive_only(batch: RewardBatch) -> Tensor:
    """``max(R_i - mean_j R_j, 0)``: failures are ignored instead of pushed down."""
    return _batch_mean(batch).clamp(min=0)


#: Built-in advantages by name.
ADVANTAGES: dict[str, AdvantageFn] = {
    "batch_mean": _batch_mean,
    "leave_one_out": _leave_one_out,
    "group": _group,
    "positive_only": _positive_only,
    "none": lambda batch: batch.rewards.clone(),  # the raw reward, no baseline
}


def _check_rewards(rewards: Tensor) -> None:
    if rewards.ndim != 1 or len(rewards) == 0:
        raise ValueError(f"rewards have shape {tuple(rewards.shape)}, expected [B] with B of 1 or more")
    if rewards.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"rewards are {rewards.dtype}; give float32 or float64")
    if not bool(rewards.isfinite().all()):
        row = int((~rewards.isfinite()).nonzero()[0])
        raise ValueError(f"reward {row} is {float(rewards[row])}; refuse such trajectories before they enter a batch")


def _groups(rewards: Tensor, group_ids: Sequence[Hashable]) -> list[list[int]]:
    if len(group_ids) != len(rewards):
        raise ValueError(f"{len(group_ids)} group_ids for {len(rewards)} rewards; give one a trajectory")
    rows: dict[Hashable, list[int]] = {}
    for row, group in enumerate(group_ids):
        rows.setdefault(group, []).append(row)
    return list(rows.values())
