"""The FlashREINFORCE objective and its ablations, as one pure function.

With ``rho = exp(logpi - logmu)`` held constant, ``m_i = 1[D_i <= delta]`` and ``T_i`` action tokens:

    L = -(1/B) sum_i  m_i A_i / T_i  sum_t  stopgrad(rho_it) logpi(a_it | h_it)

``B`` and ``T_i`` are counts before any rejection or filter. Calls on the micro-batches of a batch, on the ranks of
a data-parallel group and on context-parallel shards return parts whose plain sum is ``L``.
"""

from __future__ import annotations

from typing import Literal

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
        reduction: ``sample_mean`` averages over a trajectory's tokens first; ``token_mean`` divides everything by
            ``batch_action_tokens`` instead.
        admission: ``sequence`` drops trajectories, ``token`` drops single tokens by the same proxy and threshold.
        importance: ``token`` uses ``rho``, ``truncated`` uses ``min(rho, truncation)``, ``off`` uses 1.
        loss_mask: bool ``[b, T]`` of tokens that keep their loss (failure-token filter); changes neither ``T_i``
            nor ``D_i``.
        batch_action_tokens: action tokens of the whole update over all ranks; only for ``token_mean``.
        sum_over_context: adds a ``[k, b]`` tensor over context-parallel ranks. Called exactly once on every rank,
            also where a shard holds no action token.

    Returns:
        The scalar part of the loss, connected to ``logprobs`` even when it is 0, and its statistics.

    Raises:
        FloatingPointError: a non-finite log-probability on an action token, or (``importance="token"``) an
            overflowing ratio of an admitted token.
        ValueError: shapes, counts or switches that do not fit.
        TypeError: log-probabilities in less than float32.
    """
    view = view_tokens(logprobs, behavior_logprobs, action_mask)
    _check(logprobs, advantages, batch_size, reduction, admission, importance, loss_mask, batch_action_tokens)

    within = view.divergence <= delta if admission == "token" else torch.ones_like(action_mask)
    trajectories = sum_trajectories(view, view.too_large & within, sum_over_context)
    admitted = torch.ones_like(trajectories.sequence_kl, dtype=torch.bool)
    if admission == "sequence":
        admitted = trajectories.sequence_kl <= delta
    if importance == "token":
        check_overflow(trajectories.overflows * admitted, view.limit)

    used = within & admitted[:, None] & action_mask
    # rejected tokens get log-ratio 0 before exp: their ratio is never evaluated
    log_ratio = torch.where(used, view.log_ratio.detach(), logprobs.new_zeros(()))
    ratio = log_ratio.clamp(-view.limit, view.limit).exp()
    weight, truncated = torch.ones_like(ratio), torch.zeros_like(used)
    if importance == "token":
        weight = ratio
    elif importance == "truncated":
        weight, truncated = ratio.clamp(max=truncation), ratio > truncation

    keep = used if loss_mask is None else used & loss_mask
    weight = torch.where(keep, weight, logprobs.new_zeros(()))
    if reduction == "token_mean":
        assert batch_action_tokens is not None
        scale = advantages.double() / max(batch_action_tokens, 1)
    else:
        scale = advantages.double() / (trajectories.tokens.clamp(min=1) * batch_size)
    loss = -(weight * scale.to(logprobs.dtype)[:, None] * view.logprobs).sum()
    stats = collect_stats(view, trajectories, admitted=admitted, admitted_tokens=used, ratio=ratio, clipped=truncated)
    return loss, stats


def _check(
    logprobs: Tensor,
    advantages: Tensor,
    batch_size: int,
    reduction: str,
    admission: str,
    importance: str,
    loss_mask: Tensor | None,
    batch_action_tokens: int | None,
) -> None:
    if advantages.shape != logprobs.shape[:1]:
        raise ValueError(f"advantages have shape {tuple(advantages.shape)}, expected [{len(logprobs)}]")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; give the number of trajectories of the whole update")
    for name, value, known in (
        ("reduction", reduction, ("sample_mean", "token_mean")),
        ("admission", admission, ("sequence", "token", "off")),
        ("importance", importance, ("token", "truncated", "off")),
    ):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; choose one of {', '.join(known)}")
    if loss_mask is not None and (loss_mask.shape != logprobs.shape or loss_mask.dtype != torch.bool):
        raise ValueError(f"loss_mask is {loss_mask.dtype} {tuple(loss_mask.shape)}; give bool {tuple(logprobs.shape)}")
    if (reduction == "token_mean") != (batch_action_tokens is not None):
        raise ValueError(
            f"reduction={reduction!r} with batch_action_tokens={batch_action_tokens}: token_mean needs the global "
            "count of action tokens, sample_mean takes none"
        )
