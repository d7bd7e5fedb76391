"""Log-probabilities from hidden states and a vocabulary-parallel output weight, in float32.

With ``z = scale * hidden @ weight.T`` the gradient of a chosen log-probability is ``scale * (onehot - softmax(z))``.
The vocabulary is never gathered, and logits are reduced in float32 a few rows at a time. Mode ``keep`` holds all logits
in the model's dtype, and the backward writes their gradient over them. ``recompute`` holds those of ``chunk_tokens``
tokens and makes them again in the backward, by blocks of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

LogprobMode = Literal["keep", "recompute"]

#: Elements reduced in float32 at a time: a CPU's cache holds them, and a GPU is busy with them.
_CPU_SCRATCH = 1 << 18
_GPU_SCRATCH = 1 << 25
#: Smallest ``z - max``. Its exponential is 0 in float32, and unlike -inf it stays finite when multiplied by 0.
_FLOOR = -200.0


@dataclass(frozen=True)
class LogprobSettings:
    """Settings of :func:`head_logprobs`."""

    vocab_size: int  # without padding; the softmax leaves padded columns out
    temperature: float = 1.0  # of sampling, by which logits are divided
    mode: LogprobMode = "keep"
    chunk_tokens: int = 1024
    group: dist.ProcessGroup | None = None  # tensor-parallel; None for one rank


def head_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, settings: LogprobSettings) -> tuple[Tensor, Tensor]:
    """Compute ``log softmax(hidden @ weight.T / temperature)[target]`` and the entropy of that distribution.

    Under tensor parallelism the caller sums the gradient of ``hidden`` over the group. Only one backward is possible.

    Args:
        hidden: ``[N, H]``, equal on every rank of the group.
        weight: ``[V / TP, H]``, this rank's rows of the padded output weight, in the dtype of ``hidden``.
        targets: int64 ``[N]``, token ids of the whole vocabulary.

    Returns:
        Log-probabilities ``[N]`` and entropy ``[N]`` in nats (without gradient), float32, or float64 as the inputs.
    """
    keep = settings.mode == "keep" and torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    logprobs, entropy = _HeadLogProb.apply(hidden, weight, targets, settings, keep)
    return logprobs, entropy


class _HeadLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: LogprobSettings, keep: bool
    ) -> tuple[Tensor, Tensor]:
        shard = _Shard.of(weight, targets, settings)
        tokens, step = len(hidden), settings.chunk_tokens
        # Rows: local maximum, sum of exp(z - top), sum of exp(z - top) (z - top), chosen z - top.
        stats = torch.zeros((4, tokens), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        logits = hidden @ weight.t() if keep else None
        if logits is not None:
            _reduce_rows(logits, shard, slice(0, tokens), stats)
        else:
            buffer = hidden.new_empty((min(tokens, step), len(weight)))
            for rows in _slices(tokens, step):
                chunk = torch.mm(hidden[rows], weight.t(), out=buffer[: rows.stop - rows.start])
                _reduce_rows(chunk, shard, rows, stats)
        top, total, weighted, chosen = _combine(stats, shard, settings.group)
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, shard.local, shard.mine, top + log_total, logits)
        ctx.real, ctx.scale, ctx.chunk_tokens = shard.real, shard.scale, step
        ctx.mark_non_differentiable(entropy)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _entropy: Any) -> tuple[Any, ...]:
        hidden, weight, local, mine, log_norm, logits = ctx.saved_tensors
        shard = _Shard(local, mine, ctx.real, ctx.scale)
        if logits is not None:
            _to_gradient(logits, shard, 0, log_norm, grad)
            return logits @ weight, logits.t() @ hidden, None, None, None

        tokens, width = len(hidden), len(weight)
        block = min(width, max(1, ctx.chunk_tokens * width // max(tokens, 1)))
        buffer = hidden.new_empty(tokens * block)
        grad_weight = torch.empty_like(weight)
        # In float32, because rounding would grow with the number of vocabulary blocks.
        grad_hidden = torch.zeros_like(hidden, dtype=torch.promote_types(hidden.dtype, torch.float32))
        for columns in _slices(width, block):
            part = weight[columns]
            logits = torch.mm(hidden, part.t(), out=buffer[: tokens * len(part)].view(tokens, len(part)))
            _to_gradient(logits, shard, columns.start, log_norm, grad)
            torch.mm(logits.t(), hidden, out=grad_weight[columns])
            if grad_hidden.dtype == hidden.dtype:
                grad_hidden.addmm_(logits, part)
            else:
                grad_hidden += logits @ part
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None


@dataclass(frozen=True)
class _Shard:
    """This rank's part of the vocabulary."""

    local: Tensor  # int64 [N], the target's column on this rank, clamped where another rank has it
    mine: Tensor  # bool [N], whether this rank has the target
    real: int  # columns without padding; they come first
    scale: float  # factor of the logits, one over the temperature

    @classmethod
    def of(cls, weight: Tensor, targets: Tensor, settings: LogprobSettings) -> _Shard:
        width = len(weight)
        first = width * (dist.get_rank(settings.group) if settings.group is not None else 0)
        real = max(0, min(width, settings.vocab_size - first))
        local = targets - first
        return cls(local.clamp(0, max(real - 1, 0)), (local >= 0) & (local < real), real, 1.0 / settings.temperature)


def _reduce_rows(logits: Tensor, shard: _Shard, rows: slice, stats: Tensor) -> None:
    if not shard.real:
        return
    for part, z in _scratch_parts(logits[:, : shard.real], stats.dtype):
        at = slice(rows.start + part.start, rows.start + part.stop)
        z.copy_(logits[part, : shard.real])
        if shard.scale != 1.0:
            z.mul_(shard.scale)
        torch.amax(z, dim=-1, out=stats[0, at])
        z.sub_(stats[0, at, None])
        stats[3, at] = torch.where(shard.mine[at], z.gather(1, shard.local[at, None]).squeeze(1), 0)
        weights = z.clamp_(min=_FLOOR).exp()
        torch.sum(weights, dim=-1, out=stats[1, at])
        torch.sum(weights.mul_(z), dim=-1, out=stats[2, at])


def _combine(stats: Tensor, shard: _Shard, group: dist.ProcessGroup | None) -> Tensor:
    """Reduce every rank's ``stats`` to those of the whole vocabulary, relative to its maximum."""
    if group is None or dist.get_world_size(group) == 1:
        return stats
    top = stats[0].clone() if shard.real else torch.full_like(stats[0], float("-inf"))
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    sums = torch.zeros_like(stats[1:])
    if shard.real:
        shift = stats[0] - top
        factor = shift.exp()
        sums[0] = factor * stats[1]
        sums[1] = factor * (stats[2] + stats[1] * shift.clamp(min=_FLOOR))
        sums[2] = torch.where(shard.mine, stats[3] + shift, 0)
    dist.all_reduce(sums, group=group)
    return torch.cat([top[None], sums])


def _to_gradient(logits: Tensor, shard: _Shard, first: int, log_norm: Tensor, grad: Tensor) -> None:
    """Overwrite logits ``[N, columns]``, which begin at column ``first`` of this rank, with their gradient."""
    real = max(0, min(logits.shape[1], shard.real - first))
    logits[:, real:] = 0
    if not real:
        return
    local = shard.local - first
    hit = torch.where(shard.mine & (local >= 0) & (local < real), grad, 0).mul_(shard.scale)[:, None]
    local = local.clamp(0, real - 1)[:, None]
    minus = grad[:, None] * -shard.scale
    in_place = logits.dtype == log_norm.dtype
    for part, scratch in _scratch_parts(logits[:, :real], log_norm.dtype, allocate=not in_place):
        target = logits[part, :real]
        z = target if in_place else scratch.copy_(target)
        if shard.scale != 1.0:
            z.mul_(shard.scale)
        z.sub_(log_norm[part, None]).exp_().mul_(minus[part])
        z.scatter_add_(1, local[part], hit[part])
        if not in_place:
            target.copy_(z)


def _scratch_parts(logits: Tensor, dtype: torch.dtype, *, allocate: bool = True) -> Iterator[tuple[slice, Tensor]]:
    tokens, width = logits.shape
    rows = max(1, (_CPU_SCRATCH if logits.device.type == "cpu" else _GPU_SCRATCH) // width)
    scratch = logits.new_empty((min(rows, tokens) if allocate else 0, width), dtype=dtype)
    for part in _slices(tokens, rows):
        yield part, scratch[: part.stop - part.start]


def _slices(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))
