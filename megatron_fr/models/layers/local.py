"""What Megatron-Core's local layers, which take the place of Transformer Engine's on CPUs, refuse to do themselves."""

import math
from itertools import pairwise
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_fr.models.layers.zigzag import zigzag_positions


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, also under sequence parallelism.

    Each TP rank sees only its part of the sequence. The tag on the weight makes Megatron-Core sum its gradient.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


class CoreAttention(torch.nn.Module):
    """Causal self-attention without dropout, built and called like Megatron-Core's ``DotProductAttention``.

    It takes packed sequences. Under context parallelism every rank gathers all keys and values, and their gradients
    are scattered back.
    """

    def __init__(
        self, config: Any, *, attention_type: str, softmax_scale: float | None, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__()
        if attention_type != "self" or config.attention_dropout or config.softmax_type != "vanilla":
            raise ValueError("CoreAttention is causal self-attention without dropout and with the plain softmax only")
        self._scale = 1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self._context = pg_collection.cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, packed_seq_params: Any, **others: Any
    ) -> Tensor:
        """Attend.

        Args:
            query: ``[s, b, heads, d]``, or packed ``[t, heads, d]``; this rank's tokens in zig-zag order.
            key, value: the same with KV heads.
            mask: must be None, and so must a bias; padding stands at the end of rows, where no real token sees it.
            packed_seq_params: ``cu_seqlens_q`` of the whole sequences, over all context-parallel ranks; or None.

        Returns:
            ``[s, b, heads x d]``, or packed ``[t, heads, d]``.
        """
        if mask is not None or others.get("attention_bias") is not None:
            raise ValueError("CoreAttention takes no mask and no bias: it is causal, and padding stands at the end")
        size = self._context.size()
        if size > 1:  # [CP x s, ...]: every rank's part, one after the other
            key, value = (
                gather_from_sequence_parallel_region(part, tensor_parallel_output_grad=True, group=self._context)
                for part in (key, value)
            )
        if packed_seq_params is None:
            return self._attend(query, key, value, len(query) * size).flatten(2)
        parts = []
        keys, values = (t.view(size, -1, *t.shape[1:]) for t in (key, value))
        for start, stop in pairwise(packed_seq_params.cu_seqlens_q.tolist()):
            here = slice(start // size, stop // size)
            k, v = (t[:, here].reshape(stop - start, 1, *t.shape[2:]) for t in (keys, values))
            parts.append(self._attend(query[here, None], k, v, stop - start).squeeze(1))
        return torch.cat(parts)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, length: int) -> Tensor:
        """Attend with queries ``[s, b, heads, d]`` to keys ``[length, b, KV heads, d]`` of one sequence."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        size, mask = self._context.size(), None
        if size > 1:  # bool [length / CP, length]: the keys that each query of this rank sees
            queries = zigzag_positions(length, self._context.rank(), size)
            keys = torch.cat([zigzag_positions(length, rank, size) for rank in range(size)])
            mask = (keys[None, :] <= queries[:, None]).to(query.device)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=True
        )
        return out.permute(2, 0, 1, 3)
