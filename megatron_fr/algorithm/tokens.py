"""The part both losses share: masked log-probabilities, ratios, and per-trajectory sums over context shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fr.algorithm.stats import LossStats
from megatron_fr.algorithm.trust_region import bernoulli_kl, sequence_mean

#: Adds a ``[k, b]`` float64 tensor over the ranks that hold shards of the same trajectories.
ContextSum = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TokenView:
    """A micro-batch with its masked slots made harmless. All ``[b, T]`` unless said otherwise.

    Attributes:
        mask: bool, action tokens.
        logprobs: with gradient, 0 where masked.
        log_ratio: with gradient, ``logpi - logmu``, 0 where masked, not clamped.
        divergence: float64, ``d_it``, 0 where masked.
        too_large: bool, the ratio overflows the dtype.
        limit: the largest log-ratio whose ratio is finite.
    """

    mask: Tensor
    logprobs: Tensor
    log_ratio: Tensor
    divergence: Tensor
    too_large: Tensor
    limit: float

    @property
    def difference(self) -> Tensor:
        """float64 ``[b]``, sum of ``|logpi - logmu|``."""
        return self.log_ratio.detach().double().abs().sum(dim=1)


@dataclass(frozen=True)
class TrajectorySums:
    """Whole-trajectory values ``[b]``, equal on every context-parallel rank."""

    tokens: Tensor  # float64, T_i
    sequence_kl: Tensor  # float64, D_i
    overflows: Tensor  # float64, tokens whose ratio would overflow


def view_tokens(logprobs: Tensor, behavior_logprobs: Tensor, action_mask: Tensor) -> TokenView:
    """Check shapes and dtypes and blank the masked slots before any arithmetic.

    Raises:
        ValueError: shapes differ, or the mask is not bool.
        TypeError: log-probabilities are not float32 or float64.
    """
    shape = logprobs.shape
    if logprobs.ndim != 2 or behavior_logprobs.shape != shape or action_mask.shape != shape:
        raise ValueError(
            f"logprobs {tuple(shape)}, behavior_logprobs {tuple(behavior_logprobs.shape)} and action_mask "
            f"{tuple(action_mask.shape)} must have one shape [b, T]"
        )
    if action_mask.dtype != torch.bool:
        raise ValueError(f"action_mask is {action_mask.dtype}; give bool")
    if logprobs.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"logprobs are {logprobs.dtype}; reduce the logits in float32")
    # where, not a product: 0 * inf and 0 * nan are nan, in the value and in the gradient
    zero = logprobs.new_zeros(())
    current = torch.where(action_mask, logprobs, zero)
    behavior = torch.where(action_mask, behavior_logprobs.detach().to(logprobs.dtype), zero)
    log_ratio = current - behavior
    divergence = torch.where(action_mask, bernoulli_kl(behavior, current), zero.double())
    limit = float(math.floor(math.log(torch.finfo(logprobs.dtype).max)))
    return TokenView(action_mask, current, log_ratio, divergence, log_ratio.detach() > limit, limit)


def sum_trajectories(view: TokenView, overflows: Tensor, sum_over_context: ContextSum | None) -> TrajectorySums:
    """``T_i``, ``D_i`` and overflow counts of whole trajectories: one collective, joined by every rank.

    Args:
        view: this rank's tokens.
        overflows: bool ``[b, T]``, tokens whose ratio would be used and is not representable.
        sum_over_context: None when this rank holds whole trajectories.

    Raises:
        FloatingPointError: a non-finite log-probability on an action token; on all context ranks alike.
    """
    broken = ~view.log_ratio.detach().isfinite()
    divergence = torch.where(broken, view.divergence.new_zeros(()), view.divergence)
    counts = [view.mask.double(), divergence, broken.double(), overflows.double()]
    sums = torch.stack([c.sum(dim=1) for c in counts])
    if sum_over_context is not None:
        sums = sum_over_context(sums)
    tokens, kl, non_finite, overflowing = sums
    if bool(non_finite.any()):
        row = int(non_finite.nonzero()[0])
        raise FloatingPointError(
            f"row {row} of the micro-batch has {int(non_finite[row])} action tokens with a non-finite log-probability; "
            "check the weights and the logits"
        )
    return TrajectorySums(tokens, sequence_mean(kl, tokens), overflowing)


def check_overflow(overflows: Tensor, limit: float) -> None:
    """Refuse to train on an infinite importance ratio.

    Args:
        overflows: ``[b]``, number of used tokens whose ratio overflows.
        limit: the largest representable log-ratio.

    Raises:
        FloatingPointError: some ratio overflows.
    """
    if bool((overflows > 0).any()):
        row = int((overflows > 0).nonzero()[0])
        raise FloatingPointError(
            f"row {row} of the micro-batch has {int(overflows[row])} admitted tokens with a log-ratio above {limit:g}, "
            "whose importance ratio overflows; the policies are far apart: check weight sync, or lower algorithm.delta"
        )


def collect_stats(
    view: TokenView,
    trajectories: TrajectorySums,
    *,
    admitted: Tensor,
    admitted_tokens: Tensor,
    ratio: Tensor,
    clipped: Tensor,
) -> LossStats:
    """Assemble the report from detached ``[b, T]`` tensors; ``ratio`` is before truncation or clipping."""
    used = admitted_tokens & view.mask
    ratio = torch.where(used, ratio.detach().double(), trajectories.tokens.new_zeros(()))
    padded = torch.cat([ratio, ratio.new_zeros(len(ratio), 1)], dim=1)  # a shard may have no column
    clamped = used & (view.log_ratio.detach().abs() > view.limit)
    return LossStats(
        sequence_kl=trajectories.sequence_kl,
        admitted=admitted,
        trajectory_tokens=trajectories.tokens.long(),
        tokens=view.mask.sum(dim=1),
        admitted_tokens=used.sum(dim=1),
        ratio_sum=ratio.sum(dim=1),
        ratio_max=padded.amax(dim=1),
        clamped=clamped.sum(dim=1),
        clipped=(clipped & used).sum(dim=1),
        difference_sum=view.difference,
    )
