"""Causal core attention for Megatron-Core's local layers, with packed sequences and context parallelism.

Megatron-Core's own local attention refuses both, so on CPUs this one takes the place of Transformer Engine's.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch.nn.functional import scaled_dot_product_attention

from megatron_fr.models.layers.zigzag import zigzag_positions


class CoreAttention(torch.nn.Module):
    """Causal self-attention without dropout, built and called like Megatron-Core's ``DotProductAttention``.

    Under context parallelism every rank gathers all keys and values, and their gradients are scattered back.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        del layer_number, attn_mask_type, unused
        super().__init__()
        if attention_type != "self" or config.attention_dropout or config.softmax_type != "vanilla":
            raise ValueError("CoreAttention is causal self-attention without dropout and with the plain softmax only")
        self._scale = 1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self._context = pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: ``[s, b, heads, d]``, or packed ``[t, heads, d]``; this rank's tokens in zig-zag order.
            key, value: the same with KV heads.
            attention_mask: must be None; padding stands at the end of rows, where no real token sees it.
            packed_seq_params: ``cu_seqlens_q`` of the whole sequences, over all context-parallel ranks.

        Returns:
            ``[s, b, heads x d]``, or packed ``[t, heads, d]``.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("CoreAttention takes no mask and no bias: it is causal, and padding stands at the end")
        del attn_mask_type
        size = self._context.size()
        if size > 1:
            # [CP x s, ...]: every rank's part, one after the other
            key = gather_from_sequence_parallel_region(key, tensor_parallel_output_grad=True, group=self._context)
            value = gather_from_sequence_parallel_region(value, tensor_parallel_output_grad=True, group=self._context)
        if packed_seq_params is None:
            heads = self._attend(query, key, value, len(query) * size)
            return heads.reshape(*heads.shape[:2], -1)
        return self._attend_packed(query, key, value, packed_seq_params.cu_seqlens_q.tolist())

    def _attend_packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: list[int]
    ) -> torch.Tensor:
        """Attend within each sequence, one at a time."""
        size, parts = self._context.size(), []
        keys, values = (t.view(size, -1, *t.shape[1:]) for t in (key, value))
        for start, stop in pairwise(bounds):
            here = slice(start // size, stop // size)
            k, v = (t[:, here].reshape(stop - start, 1, *t.shape[2:]) for t in (keys, values))
            parts.append(self._attend(query[here, None], k, v, stop - start).squeeze(1))
        return torch.cat(parts)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int) -> torch.Tensor:
        """Attend with queries ``[s, b, heads, d]`` to keys ``[length, b, KV heads, d]``."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        mask = self._mask(length, query.device)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=True
        )
        return out.permute(2, 0, 1, 3)

    def _mask(self, length: int, device: torch.device) -> torch.Tensor | None:
        """Keys that each query of this rank sees, bool ``[length / CP, length]``; None without context parallelism."""
        size = self._context.size()
        if size == 1:
            return None
        queries = zigzag_positions(length, self._context.rank(), size)
        keys = torch.cat([zigzag_positions(length, rank, size) for rank in range(size)])
        return (keys[None, :] <= queries[:, None]).to(device)
