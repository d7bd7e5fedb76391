"""The failure-token filter (appendix of the paper): failures keep only their most uncertain tokens in the loss."""

from __future__ import annotations

import torch
from torch import Tensor


def failure_token_mask(entropy: Tensor, action_mask: Tensor, failed: Tensor, quantile: float) -> Tensor:
    """Tokens that keep their loss: bool ``[b, T]``, the ``loss_mask`` of ``flash_reinforce_loss``.

    Trajectories that the task calls failures keep the ``ceil(quantile * T_i)`` action tokens of highest entropy, the
    earlier of equal ones; others keep all. With context parallelism, gather whole trajectories first.

    Args:
        entropy: ``[b, T]``, of the full categorical distribution; masked slots may hold anything.
        action_mask: bool ``[b, T]``.
        failed: bool ``[b]``; a reward at or below ``algorithm.failure_threshold``.
        quantile: share kept, in ``(0, 1]``; 1 is the base method.

    Raises:
        ValueError: ``quantile`` out of range, shapes that differ, or a NaN entropy on an action token.
    """
    if not 0 < quantile <= 1:
        raise ValueError(f"failure_token_quantile is {quantile}; give a value above 0, at most 1")
    if entropy.shape != action_mask.shape or failed.shape != entropy.shape[:1]:
        raise ValueError(
            f"entropy {tuple(entropy.shape)}, action_mask {tuple(action_mask.shape)} and failed "
            f"{tuple(failed.shape)} must be [b, T], [b, T] and [b]"
        )
    if bool((entropy.isnan() & action_mask).any()):
        raise ValueError("entropy is NaN on an action token; check the logits")
    # 1e-9: 0.55 * 100 is 55.00000000000001 in binary, and must keep 55 tokens, not 56
    keep = (action_mask.sum(dim=1).double() * quantile - 1e-9).ceil().clamp(min=1)
    ranked = torch.where(action_mask, entropy.detach(), entropy.new_full((), -torch.inf))
    rank = ranked.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return action_mask & ((rank < keep[:, None]) | ~failed[:, None])
