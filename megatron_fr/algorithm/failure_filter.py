"""The failure-token filter (appendix of the paper): failures keep only their most uncertain tokens in the loss.

A trajectory has *failed* when its advantage is negative: that is when it is pushed down.
"""

from __future__ import annotations

import torch
from torch import Tensor


def failure_token_mask(entropy: Tensor, action_mask: Tensor, advantages: Tensor, quantile: float) -> Tensor:
    """Tokens that keep their loss: the ``loss_mask`` of ``flash_reinforce_loss``.

    Successes (advantage ``>= 0``) keep every action token; failures keep the ``ceil(quantile * T_i)`` of highest
    entropy. Equal entropies are ordered by position, the earlier token first. ``T_i`` of the loss is unchanged.

    The ranking is over the whole trajectory: with context parallelism, gather entropy and mask first and take
    this rank's part of the answer.

    Args:
        entropy: ``[b, T]``, of the full categorical distribution at each token; masked slots may hold anything.
        action_mask: bool ``[b, T]``.
        advantages: ``[b]``.
        quantile: share kept, in ``(0, 1]``; 1 is the base method.

    Returns:
        bool ``[b, T]``, a subset of ``action_mask``.

    Raises:
        ValueError: ``quantile`` out of range, shapes that differ, or a NaN entropy on an action token.
    """
    if not 0 < quantile <= 1:
        raise ValueError(f"failure_token_quantile is {quantile}; give a value above 0, at most 1")
    if entropy.shape != action_mask.shape or advantages.shape != entropy.shape[:1]:
        raise ValueError(
            f"entropy {tuple(entropy.shape)}, action_mask {tuple(action_mask.shape)} and advantages "
            f"{tuple(advantages.shape)} must be [b, T], [b, T] and [b]"
        )
    if bool((entropy.isnan() & action_mask).any()):
        raise ValueError("entropy is NaN on an action token; check the logits")
    # 1e-9: 0.55 * 100 is 55.00000000000001 in binary, and must keep 55 tokens, not 56
    keep = (action_mask.sum(dim=1).double() * quantile - 1e-9).ceil().clamp(min=1)
    ranked = torch.where(action_mask, entropy.detach(), entropy.new_full((), -torch.inf))
    order = ranked.argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1)
    return action_mask & ((rank < keep[:, None]) | (advantages >= 0)[:, None])
