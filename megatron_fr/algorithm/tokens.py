"""What the losses share: masked log-probabilities, ratios, and per-trajectory sums over context shards."""

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
    """A micro-batch with its masked slots made harmless: ``[b, T]``, 0 where masked."""

    mask: Tensor  # bool, action tokens
    logprobs: Tensor  # with gradient
    log_ratio: Tensor  # with gradient, logpi - logmu, not clamped
    divergence: Tensor  # float64, d_it
    too_large: Tensor  # bool, the ratio overflows the dtype
    limit: float  # the largest log-ratio whose ratio is finite

    def ratio(self, used: Tensor) -> Tensor:
        """Ratios of ``used`` tokens, 1 elsewhere: clamped against overflow, without gradient."""
        # Others get log-ratio 0 before exp: their ratio is never evaluated.
        log_ratio = torch.where(used, self.log_ratio.detach(), 0.0)
        return log_ratio.clamp(-self.limit, self.limit).exp()


@dataclass(frozen=True)
class TrajectorySums:
    """Whole-trajectory values, float64 ``[b]``, equal on every context-parallel rank."""

    tokens: Tensor  # T_i
    sequence_kl: Tensor  # D_i
    overflows: Tensor  # tokens whose ratio would overflow


def view_tokens(
    logprobs: Tensor, behavior_logprobs: Tensor, action_mask: Tensor, advantages: Tensor, batch_size: int
) -> TokenView:
    """Check one micro-batch and blank the masked slots before any arithmetic.

    Raises:
        ValueError: shapes differ, the mask is not bool, or ``batch_size`` is below 1.
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
    if advantages.shape != shape[:1]:
        raise ValueError(f"advantages have shape {tuple(advantages.shape)}, expected [{len(logprobs)}]")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; give the number of trajectories of the whole update")
    # where, not a product: 0 * inf and 0 * nan are nan, in the value and in the gradient
    current = torch.where(action_mask, logprobs, 0.0)
    behavior = torch.where(action_mask, behavior_logprobs.detach().to(logprobs.dtype), 0.0)
    log_ratio = current - behavior
    divergence = torch.where(action_mask, bernoulli_kl(behavior, current), 0.0)
    limit = float(math.floor(math.log(torch.finfo(logprobs.dtype).max)))
    return TokenView(action_mask, current, log_ratio, divergence, log_ratio.detach() > limit, limit)


def sum_trajectories(view: TokenView, overflows: Tensor, sum_over_context: ContextSum | None) -> TrajectorySums:
    """``T_i``, ``D_i`` and overflow counts of whole trajectories: one collective, joined by every rank.

    Args:
        overflows: bool ``[b, T]``, tokens whose ratio would be used and is not representable.
        sum_over_context: None when this rank holds whole trajectories.

    Raises:
        FloatingPointError: a non-finite log-probability on an action token; on all context ranks alike.
    """
    broken = ~view.log_ratio.detach().isfinite()
    divergence = torch.where(broken, 0.0, view.divergence)
    sums = torch.stack([c.double().sum(dim=1) for c in (view.mask, divergence, broken, overflows)])
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
    """Raise FloatingPointError where ``overflows`` ``[b]``, used tokens with a log-ratio above ``limit``, is not 0."""
    if bool((overflows > 0).any()):
        row = int((overflows > 0).nonzero()[0])
        raise FloatingPointError(
            f"row {row} of the micro-batch has {int(overflows[row])} admitted tokens with a log-ratio above {limit:g}, "
            "whose importance ratio overflows; the policies are far apart: check weight sync, or lower algorithm.delta"
        )


def collect_stats(
    view: TokenView,
    trajectories: TrajectorySums,
    used: Tensor,
    ratio: Tensor,
    *,
    admitted: Tensor | None = None,
    clipped: Tensor | None = None,
) -> LossStats:
    """Assemble the report.

    Args:
        used: bool ``[b, T]``, action tokens in the loss.
        ratio: ``[b, T]``, before truncation or clipping.
        admitted: bool ``[b]``; None: every trajectory.
        clipped: bool ``[b, T]``; None: no token.
    """
    ratio = torch.where(used, ratio.detach().double(), 0.0)
    padded = torch.cat([ratio, ratio.new_zeros(len(ratio), 1)], dim=1)  # a shard may have no column
    difference = view.log_ratio.detach()
    return LossStats(
        sequence_kl=trajectories.sequence_kl,
        admitted=torch.ones_like(trajectories.tokens, dtype=torch.bool) if admitted is None else admitted,
        trajectory_tokens=trajectories.tokens.long(),
        tokens=view.mask.sum(dim=1),
        admitted_tokens=used.sum(dim=1),
        ratio_sum=ratio.sum(dim=1),
        ratio_max=padded.amax(dim=1),
        clamped=(used & (difference.abs() > view.limit)).sum(dim=1),
        clipped=torch.zeros_like(used).sum(dim=1) if clipped is None else (clipped & used).sum(dim=1),
        difference_sum=difference.double().abs().sum(dim=1),
    )
