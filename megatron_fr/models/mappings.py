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

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from megatron_fr.models.sizes import Sizes


class Sliceable(Protocol):
    """A tensor, or a safetensors slice that reads only what is indexed."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The indexed part."""


Shape = tuple[str, ...]


@dataclass(frozen=True)
class WeightMapping:
    """One parameter and its Hugging Face tensors.

    Attributes:
        param: name in the whole Megatron model, in the local layers' spelling.
        hf: the Hugging Face names.
    """

    #: Whether every TP rank holds the same, so that one shard is enough to gather.
    replicated: ClassVar[bool] = False
    #: The dtype in Megatron-Core and in Hugging Face files; None: the model's.
    dtype: ClassVar[torch.dtype | None] = None

    param: str
    hf: tuple[str, ...]

    @property
    def per_expert(self) -> bool:
        """Whether there is one for every expert; these shard over expert TP instead of TP."""
        return "{expert}" in self.param

    def hf_shapes(self, sizes: Sizes) -> tuple[tuple[int, ...], ...]:
        """The whole shapes, one for each name in ``hf``."""
        raise NotImplementedError

    def shard(self, sources: Sequence[Sliceable], sizes: Sizes, rank: int, size: int) -> torch.Tensor:
        """The parameter of TP rank ``rank`` of ``size``, reading no more of ``sources`` than it needs."""
        raise NotImplementedError

    def gather(self, shards: Sequence[torch.Tensor], sizes: Sizes) -> tuple[torch.Tensor, ...]:
        """The whole Hugging Face tensors from the parameter's shards in TP rank order; undoes :meth:`shard`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Copy(WeightMapping):
    """The same tensor on every rank: norms, the router."""

    replicated: ClassVar[bool] = True
    shape: Shape

    def hf_shapes(self, sizes: Sizes) -> tuple[tuple[int, ...], ...]:
        return (sizes.shape(self.shape),)

    def shard(self, sources: Sequence[Sliceable], sizes: Sizes, rank: int, size: int) -> torch.Tensor:
        return sources[0][:]

    def gather(self, shards: Sequence[torch.Tensor], sizes: Sizes) -> tuple[torch.Tensor, ...]:
        return (shards[0],)


@dataclass(frozen=True)
class Buffer(Copy):
    """A tensor that is loaded, saved and synchronised, but never trained; float32 whatever the model's dtype."""

    dtype: ClassVar[torch.dtype | None] = torch.float32


@dataclass(frozen=True)
class VocabParallel(WeightMapping):
    """Rows of the vocabulary in equal chunks; rows added to make them equal are zero and never come back."""

    def hf_shapes(self, sizes: Sizes) -> tuple[tuple[int, ...], ...]:
        return ((sizes.vocab, sizes.hidden),)

    def shard(self, sources: Sequence[Sliceable], sizes: Sizes, rank: int, size: int) -> torch.Tensor:
        rows = sizes.padded_vocab(size) // size
        start, stop = min(rank * rows, sizes.vocab), min((rank + 1) * rows, sizes.vocab)
        real = sources[0][start:stop]
        if len(real) == rows:
            return real
        return torch.cat([real, real.new_zeros(rows - len(real), sizes.hidden)])

    def gather(self, shards: Sequence[torch.Tensor], sizes: Sizes) -> tuple[torch.Tensor, ...]:
        return (_join(shards)[: sizes.vocab],)


@dataclass(frozen=True)
class RowParallel(WeightMapping):
    """Input columns in equal chunks: the attention's and the MLP's output projections."""

    shape: Shape

    def hf_shapes(self, sizes: Sizes) -> tuple[tuple[int, ...], ...]:
        return (sizes.shape(self.shape),)

    def shard(self, sources: Sequence[Sliceable], sizes: Sizes, rank: int, size: int) -> torch.Tensor:
        columns = sizes.shape(self.shape)[1] // size
        return sources[0][:, rank * columns : (rank + 1) * columns]

    def gather(self, shards: Sequence[torch.Tensor], sizes: Sizes) -> tuple[torch.Tensor, ...]:
        return (_join(shards, dim=1),)


@dataclass(frozen=True)
class GatedMLP(WeightMapping):
    """``hf`` is gate and up; each is chunked by rows, and a rank holds its chunk of gate above its chunk of up."""

    width: str

    def hf_shapes(self, sizes: Sizes) -> tuple[tuple[int, ...], ...]:
        return (sizes.shape((self.width, "hidden")),) * 2

    def shard(self, sources: Sequence[Sliceable], sizes: Sizes, rank: int, size: int) -> torch.Tensor:
        rows = sizes.shape((self.width,))[0] // size
        return torch.cat([source[rank * rows : (rank + 1) * rows] for source in sources])

    def gather(self, shards: Sequence[torch.Tensor], sizes: Sizes) -> tuple[torch.Tensor, ...]:
        halves = [shard.chunk(2) for shard in shards]
        return _join([gate for gate, _ in halves]), _join([up for _, up in halves])


@dataclass(frozen=True)
class QKV(WeightMapping):
    """``hf`` is q, k and v, weights or biases; rows are grouped by KV head: its query heads, its key, its value."""

    bias: bool = False

    def hf_shapes(self, sizes: Sizes) -> tuple[tuple[int, ...], ...]:
        tail = () if self.bias else (sizes.hidden,)
        return (sizes.q_size, *tail), (sizes.kv_size, *tail), (sizes.kv_size, *tail)

    def shard(self, sources: Sequence[Sliceable], sizes: Sizes, rank: int, size: int) -> torch.Tensor:
        parts = []
        for source, whole in zip(sources, (sizes.q_size, sizes.kv_size, sizes.kv_size), strict=True):
            rows = whole // size
            part = source[rank * rows : (rank + 1) * rows]
            parts.append(part.reshape(sizes.kv_heads // size, -1, *part.shape[1:]))
        grouped = torch.cat(parts, dim=1)
        return grouped.reshape(-1, *grouped.shape[2:])

    def gather(self, shards: Sequence[torch.Tensor], sizes: Sizes) -> tuple[torch.Tensor, ...]:
        whole = _join(shards)
        tail = whole.shape[1:]
        grouped = whole.reshape(sizes.kv_heads, -1, *tail)
        queries = sizes.q_size // sizes.kv_heads
        q, k, v = grouped.split([queries, sizes.head_dim, sizes.head_dim], dim=1)
        return q.reshape(-1, *tail), k.reshape(-1, *tail), v.reshape(-1, *tail)


def _join(shards: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """The shards side by side; one alone as it is, not copied."""
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=dim)
