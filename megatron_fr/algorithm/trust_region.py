"""The Sequence Trust Region's divergence: a Bernoulli KL from stored log-probabilities, no behavior logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Probabilities are clamped to ``[CLAMP, 1 - CLAMP]`` in the divergence only, as the published implementation does.
CLAMP = 1e-6
_LOG_LOW = math.log(CLAMP)
_LOG_HIGH = math.log1p(-CLAMP)


def bernoulli_kl(behavior_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """``d = p log(p/q) + (1-p) log((1-p)/(1-q))`` with ``p = exp(behavior_logprobs)`` and ``q = exp(logprobs)``.

    The KL of "the sampled action" against "everything else". Works in log space and float64: in float32 the two
    terms cancel to noise of either sign near ``p = q``. ``1 - p`` comes from ``expm1``, so it keeps its digits
    near ``p = 1``.

    Args:
        behavior_logprobs: natural logs, any shape, any float dtype.
        logprobs: the same shape; detached.

    Returns:
        float64, finite and ``>= 0`` for every finite input (and for ``-inf``), exactly 0 where both are equal.
    """
    log_p = behavior_logprobs.detach().double().clamp(_LOG_LOW, _LOG_HIGH)
    log_q = logprobs.detach().double().clamp(_LOG_LOW, _LOG_HIGH)
    p, not_p, not_q = log_p.exp(), -torch.expm1(log_p), -torch.expm1(log_q)
    # log(1-p) - log(1-q) as one log1p: exact 0 for p == q, accurate for p close to q
    complement = torch.log1p((not_p - not_q) / not_q)
    return (p * (log_p - log_q) + not_p * complement).clamp(min=0)


def sequence_mean(token_sums: Tensor, tokens: Tensor) -> Tensor:
    """``D_i``: the mean over a trajectory's action tokens, clamped at 0; 0 where there are none.

    Both arguments ``[b]``, already summed over context-parallel ranks.
    """
    return (token_sums / tokens.clamp(min=1)).clamp(min=0)
