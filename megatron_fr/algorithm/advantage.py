"""Advantages: what a trajectory's reward is compared with. Pure functions of the whole global batch's rewards.

A new one is a function of ``(rewards, group_ids)`` under :func:`register_advantage`; its name is then valid for
:func:`compute_advantages`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

#: Added to a group's standard deviation, as GRPO implementations do; without it an all-equal group divides 0 by 0.
GROUP_STD_EPS = 1e-6

AdvantageFn = Callable[[Tensor, Sequence[Hashable] | None], Tensor]

#: Name to function; each takes float64 rewards ``[B]`` and returns float64 ``[B]``.
ADVANTAGES: dict[str, AdvantageFn] = {}


def register_advantage(name: str) -> Callable[[AdvantageFn], AdvantageFn]:
    """Make an advantage known under ``name``.

    Raises:
        ValueError: the name is taken.
    """

    def register(function: AdvantageFn) -> AdvantageFn:
        if name in ADVANTAGES:
            raise ValueError(f"advantage {name!r} is registered already; choose another name")
        ADVANTAGES[name] = function
        return function

    return register


def compute_advantages(name: str, rewards: Tensor, group_ids: Sequence[Hashable] | None = None) -> Tensor:
    """Advantages of one global batch.

    Args:
        name: a key of :data:`ADVANTAGES`.
        rewards: float32 or float64 ``[B]``, all data-parallel ranks' rewards: the mean is global.
        group_ids: ``B`` group names, needed by ``group`` only.

    Returns:
        ``[B]`` in the dtype of ``rewards``; the arithmetic is float64.

    Raises:
        ValueError: unknown name, empty or non-finite rewards, or groups that do not fit.
        TypeError: rewards are not floating point.
    """
    if name not in ADVANTAGES:
        raise ValueError(f"advantage {name!r} is unknown; choose one of {', '.join(sorted(ADVANTAGES))}")
    _check_rewards(rewards)
    return ADVANTAGES[name](rewards.detach().double(), group_ids).to(rewards.dtype)


def batch_mean_advantages(rewards: Tensor) -> Tensor:
    """``A_i = R_i - mean_j R_j``, no division by the standard deviation (One-Batch REINFORCE).

    Takes and returns float ``[B]``; see :func:`compute_advantages`.
    """
    return compute_advantages("batch_mean", rewards)


def has_signal(rewards: Tensor, group_ids: Sequence[Hashable] | None = None) -> bool:
    """Whether a batch tells good from bad.

    All-equal rewards do not. With ``group_ids`` rewards are compared inside their group only, so a batch has
    no signal when every group's rewards are equal, even if groups differ.
    """
    _check_rewards(rewards)
    if group_ids is None:
        return bool(rewards.max() > rewards.min())
    return any(bool(rewards[rows].max() > rewards[rows].min()) for rows in _groups(rewards, group_ids))


@register_advantage("batch_mean")
def _batch_mean(rewards: Tensor, group_ids: Sequence[Hashable] | None) -> Tensor:
    return rewards - rewards.mean()


@register_advantage("leave_one_out")
def _leave_one_out(rewards: Tensor, group_ids: Sequence[Hashable] | None) -> Tensor:
    """``A_i = R_i - mean_{j != i} R_j``."""
    others = len(rewards) - 1
    if others == 0:
        raise ValueError("advantage 'leave_one_out' of a batch of 1 has no other trajectory; raise train.batch_size")
    return rewards - (rewards.sum() - rewards) / others


@register_advantage("group")
def _group(rewards: Tensor, group_ids: Sequence[Hashable] | None) -> Tensor:
    """``A_i = (R_i - mean_g) / (std_g + eps)``, the sample standard deviation (``n - 1``) over the group (GRPO)."""
    if group_ids is None:
        raise ValueError("advantage 'group' needs group_ids")
    advantages = torch.zeros_like(rewards)
    for rows in _groups(rewards, group_ids):
        if len(rows) == 1:
            raise ValueError(f"group {group_ids[rows[0]]!r} has one trajectory; groups need two or more")
        members = rewards[rows]
        advantages[rows] = (members - members.mean()) / (members.std(correction=1) + GROUP_STD_EPS)
    return advantages


@register_advantage("positive_only")
def _positive_only(rewards: Tensor, group_ids: Sequence[Hashable] | None) -> Tensor:
    """``max(R_i - mean_j R_j, 0)``: failures are ignored instead of pushed down."""
    return (rewards - rewards.mean()).clamp(min=0)


@register_advantage("none")
def _none(rewards: Tensor, group_ids: Sequence[Hashable] | None) -> Tensor:
    """The raw reward, no baseline."""
    return rewards.clone()


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
