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

    Both are natural logs of one shape, any float dtype. The result is float64 without gradient: finite and ``>= 0``
    for every finite input and ``-inf``, exactly 0 where both are equal. In float32 the two terms would cancel to
    noise near ``p = q``; ``expm1`` keeps the digits of ``1 - p`` near ``p = 1``.
    """
    log_p = behavior_logprobs.detach().double().clamp(_LOG_LOW, _LOG_HIGH)
    log_q = logprobs.detach().double().clamp(_LOG_LOW, _LOG_HIGH)
    p, not_p, not_q = log_p.exp(), -torch.expm1(log_p), -torch.expm1(log_q)
    # log(1-p) - log(1-q) as one log1p: exact 0 for p == q, accurate for p close to q
    complement = torch.log1p((not_p - not_q) / not_q)
    return (p * (log_p - log_q) + not_p * complement).clamp(min=0)


def sequence_mean(token_sums: Tensor, tokens: Tensor) -> Tensor:
    """``D_i`` ``[b]``: the mean over a trajectory's action tokens, clamped at 0; 0 where there are none."""
    return (token_sums / tokens.clamp(min=1)).clamp(min=0)
