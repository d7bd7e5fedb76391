"""The kinds of weight mappings: how tensors named as in Hugging Face become one Megatron-Core parameter, and back.

Each joins one parameter of the whole (unsharded) Megatron model to one or more Hugging Face tensors. ``{layer}``
and ``{expert}`` in names stand for global indices from 0.

Worked example, Qwen3-MoE with 8 experts, on TP 2 x EP 2 with expert TP 1:

- ``GatedMLP("decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight", gate, up)``: EP rank 1
  holds experts 4 to 7 as its local experts 0 to 3; expert 5's parameter is ``cat(gate, up)`` of
  ``model.layers.{layer}.mlp.experts.5``, whole on that rank because expert TP is 1.
- ``QKV(...)`` with 4 query heads, 2 KV heads: the rows of the whole parameter are ``[q0 q1 k0 v0 | q2 q3 k1 v1]``, and
  TP rank 1 holds the half after the bar. From Hugging Face that is rows 2 and 3 of q's heads and row 1 of k's and v's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class Sizes:
    """Sizes that weight mappings speak of; those of experts are 0 for dense models.

    Attributes:
        ffn: width of a dense MLP.
        moe_ffn, shared_ffn: width of one routed expert, and of the expert that every token passes (0: none).
        top_k: experts chosen for each token.
        moe_layers: layers, from 0 and ascending, whose MLP is a mixture of experts.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    experts: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    top_k: int = 0
    moe_layers: tuple[int, ...] = ()

    @property
    def moe(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return bool(self.moe_layers)

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim

    def padded_vocab(self, tp: int) -> int:
        """The vocabulary, rounded up to a multiple of the TP size."""
        return -(-self.vocab // tp) * tp


@dataclass(frozen=True)
class WeightMapping:
    """One parameter and its Hugging Face tensors.

    Attributes:
        param: name in the whole Megatron model, in the local layers' spelling.
        hf: the Hugging Face names.
        shapes: for each name in ``hf`` the names of its sizes; one for all of them.
    """

    #: Whether every TP rank holds the same, so that one shard is enough to gather.
    replicated: ClassVar[bool] = False
    #: The dtype in Megatron-Core and in Hugging Face files; None: the model's.
    dtype: ClassVar[torch.dtype | None] = None

    param: str
    hf: tuple[str, ...]
    shapes: tuple[tuple[str, ...], ...]

    @property
    def per_expert(self) -> bool:
        """Whether there is one for every expert; these shard over expert TP instead of TP."""
        return "{expert}" in self.param

    def hf_shapes(self, sizes: Sizes) -> tuple[tuple[int, ...], ...]:
        """The whole shapes, one for each name in ``hf``."""
        return tuple(tuple(getattr(sizes, name) for name in shape) for shape in self.shapes)

    def shard(self, sources: Sequence[torch.Tensor], sizes: Sizes, rank: int, size: int) -> torch.Tensor:
        """The parameter of TP rank ``rank`` of ``size``; may be a view of a source."""
        raise NotImplementedError

    def gather(self, shards: Sequence[torch.Tensor], sizes: Sizes) -> tuple[torch.Tensor, ...]:
        """The whole Hugging Face tensors from the parameter's shards in TP rank order; undoes :meth:`shard`."""
        raise NotImplementedError


class Copy(WeightMapping):
    """The same tensor on every rank: norms, the router."""

    replicated = True

    def shard(self, sources: Sequence[torch.Tensor], sizes: Sizes, rank: int, size: int) -> torch.Tensor:
        return sources[0]

    def gather(self, shards: Sequence[torch.Tensor], sizes: Sizes) -> tuple[torch.Tensor, ...]:
        return (shards[0],)


class Buffer(Copy):
    """A tensor that is loaded, saved and synchronised, but never trained; float32 whatever the model's dtype."""

    dtype = torch.float32


class VocabParallel(WeightMapping):
    """Rows of the vocabulary in equal chunks; rows added to make them equal are zero and never come back."""

    def shard(self, sources: Sequence[torch.Tensor], sizes: Sizes, rank: int, size: int) -> torch.Tensor:
        rows = sizes.padded_vocab(size) // size
        real = sources[0][rank * rows : (rank + 1) * rows]
        return real if len(real) == rows else torch.nn.functional.pad(real, (0, 0, 0, rows - len(real)))

    def gather(self, shards: Sequence[torch.Tensor], sizes: Sizes) -> tuple[torch.Tensor, ...]:
        return (_join(shards)[: sizes.vocab],)


class RowParallel(WeightMapping):
    """Input columns in equal chunks: the attention's and the MLP's output projections."""

    def shard(self, sources: Sequence[torch.Tensor], sizes: Sizes, rank: int, size: int) -> torch.Tensor:
        return sources[0].chunk(size, dim=1)[rank]

    def gather(self, shards: Sequence[torch.Tensor], sizes: Sizes) -> tuple[torch.Tensor, ...]:
        return (_join(shards, dim=1),)


class GatedMLP(WeightMapping):
    """``hf`` is gate and up; each is chunked by rows, and a rank holds its chunk of gate above its chunk of up."""

    def shard(self, sources: Sequence[torch.Tensor], sizes: Sizes, rank: int, size: int) -> torch.Tensor:
        return torch.cat([source.chunk(size)[rank] for source in sources])

    def gather(self, shards: Sequence[torch.Tensor], sizes: Sizes) -> tuple[torch.Tensor, ...]:
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return _join(gates), _join(ups)


class QKV(WeightMapping):
    """``hf`` is q, k and v, weights or biases; rows are grouped by KV head: its query heads, its key, its value."""

    def shard(self, sources: Sequence[torch.Tensor], sizes: Sizes, rank: int, size: int) -> torch.Tensor:
        groups = (sizes.kv_heads // size, -1)
        return torch.cat([source.chunk(size)[rank].unflatten(0, groups) for source in sources], dim=1).flatten(0, 1)

    def gather(self, shards: Sequence[torch.Tensor], sizes: Sizes) -> tuple[torch.Tensor, ...]:
        grouped = _join(shards).unflatten(0, (sizes.kv_heads, -1))
        parts = grouped.split([sizes.q_size // sizes.kv_heads, sizes.head_dim, sizes.head_dim], dim=1)
        return tuple(part.flatten(0, 1) for part in parts)


def _join(shards: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """The shards side by side; one alone as it is, not copied."""
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=dim)
