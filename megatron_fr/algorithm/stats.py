"""What a loss call reports, in a form that micro-batches and ranks add up exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Order of :meth:`LossStats.sums`.
SUM_NAMES = (
    "rows", "admitted_rows", "kl_sum",
    "tokens", "admitted_tokens", "ratio_sum", "clamped", "clipped", "difference_sum",
)  # fmt: skip
#: Order of :meth:`LossStats.maxima`.
MAX_NAMES = ("kl_max", "ratio_max")


@dataclass(frozen=True)
class LossStats:
    """Detached tensors ``[b]``, one entry a row of the micro-batch.

    The first three describe whole trajectories and are equal on every context-parallel rank; the others cover the
    tokens this call saw.
    """

    sequence_kl: Tensor  # float64, D_i in nats
    admitted: Tensor  # bool, m_i; always true unless admission is by sequence
    trajectory_tokens: Tensor  # int64, T_i, before any filter
    tokens: Tensor  # int64, action tokens seen here
    admitted_tokens: Tensor  # int64, those of them that passed the trust region
    ratio_sum: Tensor  # float64, over admitted tokens, of the ratio before truncation or clipping
    ratio_max: Tensor  # float64, its maximum, 0 without admitted tokens
    clamped: Tensor  # int64, admitted tokens whose log-ratio was clamped against overflow or underflow
    clipped: Tensor  # int64, tokens on which a clip or truncation was active
    difference_sum: Tensor  # float64, sum of |logpi - logmu| over all action tokens, rejected ones included

    def sums(self, count_rows: bool = True) -> Tensor:
        """float64 ``[len(SUM_NAMES)]``, to be added over micro-batches and all-reduced (sum) over DP and CP ranks.

        Rows without an action token (padding) are not counted.

        Args:
            count_rows: set it on one rank of each context-parallel group only; the others hold the same rows.
        """
        real = self.trajectory_tokens > 0
        rows = torch.stack([real.sum(), (self.admitted & real).sum(), (self.sequence_kl * real).sum()]).double()
        tokens = [
            self.tokens, self.admitted_tokens, self.ratio_sum, self.clamped, self.clipped, self.difference_sum,
        ]  # fmt: skip
        return torch.cat([rows * float(count_rows), torch.stack([t.double().sum() for t in tokens])])

    def maxima(self) -> Tensor:
        """float64 ``[len(MAX_NAMES)]``, to be all-reduced by maximum; 0 without rows."""
        zero = self.ratio_max.new_zeros(1)
        return torch.stack([torch.cat([self.sequence_kl, zero]).max(), torch.cat([self.ratio_max, zero]).max()])


def policy_metrics(sums: Tensor, maxima: Tensor) -> dict[str, float]:
    """The ``policy/...`` metrics of a whole update, from its reduced ``sums`` and ``maxima``."""
    total = dict(zip(SUM_NAMES, sums.tolist(), strict=True))
    highest = dict(zip(MAX_NAMES, maxima.tolist(), strict=True))
    rows, tokens, admitted = (max(total[name], 1.0) for name in ("rows", "tokens", "admitted_tokens"))
    return {
        "policy/ratio_mean": total["ratio_sum"] / admitted,
        "policy/ratio_max": highest["ratio_max"],
        "policy/ratio_clamped": total["clamped"] / tokens,
        "policy/clipped": total["clipped"] / tokens,
        "trust_region/seq_kl_mean": total["kl_sum"] / rows,
        "trust_region/seq_kl_max": highest["kl_max"],
        "trust_region/admitted": total["admitted_rows"] / rows,
        "trust_region/admitted_tokens": total["admitted_tokens"] / tokens,
        "policy/train_rollout_logprob_diff": total["difference_sum"] / tokens,
    }
