"""The FlashREINFORCE objective and its ablations, as one pure function.

With ``rho = exp(logpi - logmu)`` held constant, ``m_i = 1[D_i <= delta]`` and ``T_i`` action tokens:

    L = -(1/B) sum_i  m_i A_i / T_i  sum_t  stopgrad(rho_it) logpi(a_it | h_it)

``B`` and ``T_i`` are counts before any rejection or filter. Calls on the micro-batches of a batch, on the ranks of
a data-parallel group and on context-parallel shards return parts whose plain sum is ``L``.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_fr.algorithm.stats import LossStats
from megatron_fr.algorithm.tokens import ContextSum, check_overflow, collect_stats, sum_trajectories, view_tokens

Reduction = Literal["sample_mean", "token_mean"]
Admission = Literal["sequence", "token", "off"]
Importance = Literal["token", "truncated", "off"]


def flash_reinforce_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    delta: float,
    batch_size: int,
    reduction: Reduction = "sample_mean",
    admission: Admission = "sequence",
    importance: Importance = "token",
    truncation: float = 2.0,
    loss_mask: Tensor | None = None,
    batch_action_tokens: int | None = None,
    sum_over_context: ContextSum | None = None,
) -> tuple[Tensor, LossStats]:
    """One micro-batch's part of the loss. Gradients flow through ``logprobs`` only.

    Args:
        logprobs: float32 or float64 ``[b, T]``, the tempered policy's; masked slots may hold anything.
        behavior_logprobs: ``[b, T]``, stored when the tokens were sampled; masked slots may hold anything.
        advantages: ``[b]``, of the global batch.
        action_mask: bool ``[b, T]``, tokens the policy sampled.
        delta: trust-region threshold in nats, of ``D_i`` or of each ``d_it``.
        batch_size: ``B``, trajectories of the whole update over all ranks.
        reduction: ``token_mean`` divides everything by ``batch_action_tokens`` instead.
        admission: ``sequence`` drops trajectories, ``token`` drops single tokens by the same proxy and threshold.
        importance: ``token`` uses ``rho``, ``truncated`` uses ``min(rho, truncation)``, ``off`` uses 1.
        loss_mask: bool ``[b, T]`` of tokens that keep their loss (failure-token filter); changes neither ``T_i``
            nor ``D_i``.
        batch_action_tokens: action tokens of the whole update over all ranks; only for ``token_mean``.
        sum_over_context: adds a ``[k, b]`` tensor over context-parallel ranks. Every rank calls it exactly once.

    Returns:
        The scalar part of the loss, connected to ``logprobs`` even when it is 0, and its statistics.

    Raises:
        FloatingPointError: a non-finite log-probability on an action token, or (``importance="token"``) an
            overflowing ratio of an admitted token.
        ValueError: shapes, counts or switches that do not fit.
        TypeError: log-probabilities in less than float32.
    """
    view = view_tokens(logprobs, behavior_logprobs, action_mask, advantages, batch_size)
    for name, value, known in (
        ("reduction", reduction, get_args(Reduction)),
        ("admission", admission, get_args(Admission)),
        ("importance", importance, get_args(Importance)),
    ):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; choose one of {', '.join(known)}")
    if not delta >= 0:  # also NaN
        raise ValueError(f"delta is {delta}; give a threshold in nats of 0 or more")
    if loss_mask is not None and (loss_mask.shape != logprobs.shape or loss_mask.dtype != torch.bool):
        raise ValueError(f"loss_mask is {loss_mask.dtype} {tuple(loss_mask.shape)}; give bool {tuple(logprobs.shape)}")
    if (reduction == "token_mean") != (batch_action_tokens is not None):
        raise ValueError(
            f"reduction={reduction!r} with batch_action_tokens={batch_action_tokens}: token_mean needs the global "
            "count of action tokens, sample_mean takes none"
        )

    within = view.divergence <= delta if admission == "token" else torch.ones_like(action_mask)
    trajectories = sum_trajectories(view, view.too_large & within, sum_over_context)
    admitted = trajectories.sequence_kl <= (delta if admission == "sequence" else torch.inf)
    if importance == "token":
        check_overflow(trajectories.overflows * admitted, view.limit)

    used = within & admitted[:, None] & action_mask
    weight = ratio = view.ratio(used)
    if importance == "off":
        weight = torch.ones_like(ratio)
    elif importance == "truncated":
        weight = ratio.clamp(max=truncation)
    weight = torch.where(used if loss_mask is None else used & loss_mask, weight, 0.0)
    if batch_action_tokens is None:
        scale = advantages.double() / (trajectories.tokens.clamp(min=1) * batch_size)
    else:
        scale = advantages.double() / max(batch_action_tokens, 1)
    loss = -(weight * scale.to(logprobs.dtype)[:, None] * view.logprobs).sum()
    clipped = ratio > truncation if importance == "truncated" else None
    return loss, collect_stats(view, trajectories, used, ratio, admitted=admitted, clipped=clipped)
