"""Selected log-probabilities and entropy from vocabulary-parallel logits.

Nothing gathers the vocabulary and nothing keeps a float32 copy of all logits: tokens are walked in chunks, each chunk
reduced in float32, in the forward and again in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

#: Tokens reduced at a time: bounds the float32 scratch to chunk x vocabulary / TP.
CHUNK_TOKENS = 2048


def vocab_parallel_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``log softmax(logits / temperature)[target]`` and the entropy of that distribution.

    Args:
        logits: ``[..., V / TP]``, float32 or bfloat16, this rank's slice of the (padded) vocabulary.
        targets: int64 ``[...]``, global token ids.
        temperature: of sampling; the behavior log-probabilities are those of the tempered distribution.
        vocab_size: true vocabulary; padded columns beyond it take no part in the softmax.
        group: the tensor-parallel group, None for one rank.
        chunk_tokens: tokens reduced at a time.

    Returns:
        float32 ``[...]`` log-probabilities (differentiable) and float32 ``[...]`` entropy in nats (without gradient).
    """
    flat = logits.reshape(-1, logits.shape[-1])
    logprobs, entropy = _SelectedLogProb.apply(
        flat, targets.reshape(-1), 1.0 / temperature, vocab_size, group, chunk_tokens
    )
    return logprobs.view(targets.shape), entropy.view(targets.shape)


class _SelectedLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        scale: float,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        chunk_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, width = logits.shape
        rank = dist.get_rank(group) if group is not None else 0
        first = rank * width
        # How many of this rank's columns are real; the rest pad the vocabulary to a multiple of TP.
        real = max(0, min(width, vocab_size - first))
        local = targets - first
        mine = (local >= 0) & (local < real)
        local = local.clamp(0, width - 1)

        top = logits.new_full((tokens,), float("-inf"), dtype=torch.float32)
        for rows in _chunks(tokens, chunk_tokens):
            if real:
                top[rows] = logits[rows, :real].float().amax(dim=-1).mul_(scale)
        _reduce(top, dist.ReduceOp.MAX, group)

        # Rows: sum of exp(z - top), sum of exp(z - top) (z - top), selected z - top. One reduction for the three.
        sums = torch.zeros((3, tokens), dtype=torch.float32, device=logits.device)
        for rows in _chunks(tokens, chunk_tokens):
            if not real:
                continue
            z = logits[rows, :real].to(torch.float32, copy=True).mul_(scale).sub_(top[rows, None])
            selected = z.gather(1, local[rows, None].clamp(max=real - 1)).squeeze(1)
            sums[2, rows] = torch.where(mine[rows], selected, torch.zeros_like(selected))
            weights = z.exp()
            sums[0, rows] = weights.sum(dim=-1)
            # A logit of -inf has weight 0 and must add 0 to the entropy, not 0 * -inf.
            sums[1, rows] = (weights * torch.where(weights > 0, z, torch.zeros_like(z))).sum(dim=-1)
        _reduce(sums, dist.ReduceOp.SUM, group)

        log_total = sums[0].log()
        logprobs = sums[2] - log_total
        entropy = log_total - sums[1] / sums[0]
        ctx.save_for_backward(logits, local, mine, top + log_total)
        ctx.scale, ctx.real, ctx.chunk_tokens = scale, real, chunk_tokens
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _entropy: Any) -> tuple[Any, ...]:
        logits, local, mine, log_norm = ctx.saved_tensors
        real, scale = ctx.real, ctx.scale
        out = torch.zeros_like(logits)
        for rows in _chunks(len(logits), ctx.chunk_tokens):
            if not real:
                continue
            # d logp / d logit = scale * (onehot - softmax)
            g = grad[rows, None] * scale
            part = (
                logits[rows, :real].to(torch.float32, copy=True).mul_(scale).sub_(log_norm[rows, None]).exp_().mul_(-g)
            )
            hit = torch.where(mine[rows, None], g, torch.zeros_like(g))
            part.scatter_add_(1, local[rows, None].clamp(max=real - 1), hit)
            out[rows, :real] = part.to(logits.dtype)
        return out, None, None, None, None, None


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _reduce(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
