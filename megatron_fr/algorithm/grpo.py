"""GRPO's objective, the baseline: PPO clip on token ratios, mean over all tokens of the batch.

    L = -(1/sum_i T_i) sum_i sum_t min(rho_it A_i, clip(rho_it, 1 - clip_low, 1 + clip_high) A_i)

``rho`` carries the gradient here. Its denominator is the policy before the update: in an update's first step it is 1.
DeepSeekMath's form (arXiv:2402.03300, equation 3, without its reference-policy term) takes the mean over a response's
tokens first: ``sample_mean``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fr.algorithm.stats import LossStats
from megatron_fr.algorithm.tokens import ContextSum, check_overflow, collect_stats, sum_trajectories, view_tokens


def grpo_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    batch_size: int,
    old_logprobs: Tensor | None = None,
    batch_action_tokens: int | None = None,
    sum_over_context: ContextSum | None = None,
) -> tuple[Tensor, LossStats]:
    """One micro-batch's part of the loss; tensors and errors as in ``flash_reinforce_loss``.

    Args:
        advantages: ``[b]``, normalised per group.
        clip_low: the ratio's floor is ``1 - clip_low``.
        clip_high: the ratio's ceiling is ``1 + clip_high``.
        old_logprobs: ``[b, T]`` of the policy before the update; None: of this one, without gradient.
        batch_action_tokens: of the whole update over all ranks, for the mean over all tokens; None: over responses.

    Returns:
        The scalar part of the loss and its statistics. ``clipped`` counts tokens whose gradient the clip cut off;
        nothing is rejected.

    Raises:
        FloatingPointError: a non-finite log-probability on an action token, or an overflowing ratio where the
            advantage is negative (where it is positive the clip bounds it).
    """
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    change = view_tokens(logprobs, old, action_mask, advantages, batch_size)
    view = view_tokens(logprobs, behavior_logprobs, action_mask, advantages, batch_size)  # for the statistics
    signed = advantages.to(logprobs.dtype)[:, None]
    trajectories = sum_trajectories(view, change.too_large & (signed < 0), sum_over_context)
    check_overflow(trajectories.overflows, view.limit)

    ratio = change.log_ratio.clamp(-view.limit, view.limit).exp()
    free, bounded = ratio * signed, ratio.clamp(1 - clip_low, 1 + clip_high) * signed
    per_token = torch.where(action_mask, torch.minimum(free, bounded), 0.0)
    if batch_action_tokens is None:
        per_token = per_token / (trajectories.tokens.clamp(min=1) * batch_size).to(logprobs.dtype)[:, None]
    else:
        per_token = per_token / max(batch_action_tokens, 1)
    loss = -per_token.sum()
    return loss, collect_stats(view, trajectories, action_mask, ratio, clipped=(bounded < free).detach())
