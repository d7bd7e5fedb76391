"""What a loss call reports, in a form that micro-batches and ranks add up exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

_ROW_FIELDS = ("sequence_kl", "admitted", "trajectory_tokens")
_MAX_FIELDS = ("ratio_max",)

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

    The first three describe the whole trajectory and are equal on every context-parallel rank; the others cover
    the tokens this call saw, so that ranks add up (``ratio_max``: the maximum).

    Attributes:
        sequence_kl: float64, ``D_i`` in nats.
        admitted: bool, ``m_i``; always true unless admission is by sequence.
        trajectory_tokens: int64, ``T_i``, before any filter.
        tokens: int64, action tokens seen here.
        admitted_tokens: int64, those of them that passed the trust region.
        ratio_sum: float64, sum over admitted tokens of the ratio before truncation or clipping.
        ratio_max: float64, its maximum, 0 without admitted tokens.
        clamped: int64, admitted tokens whose log-ratio was clamped against overflow or underflow.
        clipped: int64, tokens on which a clip or truncation was active.
        difference_sum: float64, sum of ``|logpi - logmu|`` over all action tokens, rejected ones included.
    """

    sequence_kl: Tensor
    admitted: Tensor
    trajectory_tokens: Tensor
    tokens: Tensor
    admitted_tokens: Tensor
    ratio_sum: Tensor
    ratio_max: Tensor
    clamped: Tensor
    clipped: Tensor
    difference_sum: Tensor

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


def combine(parts: Sequence[LossStats]) -> LossStats:
    """Join calls on *different* rows (micro-batches, data-parallel ranks), in order."""
    return LossStats(**{f.name: torch.cat([getattr(p, f.name) for p in parts]) for f in fields(LossStats)})


def combine_context(parts: Sequence[LossStats]) -> LossStats:
    """Join calls on context-parallel shards of the *same* rows.

    Raises:
        ValueError: the shards disagree about a whole trajectory, so one of them missed the context sum.
    """
    joined: dict[str, Tensor] = {}
    for name in (f.name for f in fields(LossStats)):
        values = torch.stack([getattr(p, name) for p in parts])
        if name in _ROW_FIELDS:
            if not bool((values == values[0]).all()):
                raise ValueError(f"context shards disagree about {name}; was sum_over_context given on every rank?")
            joined[name] = values[0]
        else:
            joined[name] = values.amax(dim=0) if name in _MAX_FIELDS else values.sum(dim=0)
    return LossStats(**joined)


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
