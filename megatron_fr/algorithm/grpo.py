"""GRPO's objective, the baseline: PPO clip on token ratios, mean over a response's tokens, then over responses.

    L = -(1/B) sum_i 1/T_i sum_t min(rho_it A_i, clip(rho_it, 1 - clip_low, 1 + clip_high) A_i)

(DeepSeekMath, arXiv:2402.03300, equation 3, without its reference-policy term.) ``rho`` carries the gradient here;
the old policy is the one that sampled, with the log-probabilities stored then.
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
    sum_over_context: ContextSum | None = None,
) -> tuple[Tensor, LossStats]:
    """One micro-batch's part of the loss; tensors and errors as in ``flash_reinforce_loss``.

    Args:
        advantages: ``[b]``, normalised per group.
        clip_low: the ratio's floor is ``1 - clip_low``.
        clip_high: the ratio's ceiling is ``1 + clip_high``.

    Returns:
        The scalar part of the loss and its statistics. ``clipped`` counts tokens whose gradient the clip cut off;
        nothing is rejected.

    Raises:
        FloatingPointError: a non-finite log-probability on an action token, or an overflowing ratio where the
            advantage is negative (where it is positive the clip bounds it).
    """
    view = view_tokens(logprobs, behavior_logprobs, action_mask, advantages, batch_size)
    signed = advantages.to(logprobs.dtype)[:, None]
    trajectories = sum_trajectories(view, view.too_large & (signed < 0), sum_over_context)
    check_overflow(trajectories.overflows, view.limit)

    ratio = view.log_ratio.clamp(-view.limit, view.limit).exp()
    free, bounded = ratio * signed, ratio.clamp(1 - clip_low, 1 + clip_high) * signed
    per_token = torch.where(action_mask, torch.minimum(free, bounded), 0.0)
    scale = (1 / (trajectories.tokens.clamp(min=1) * batch_size)).to(logprobs.dtype)
    loss = -(per_token * scale[:, None]).sum()
    return loss, collect_stats(view, trajectories, action_mask, ratio, clipped=(bounded < free).detach())
