"""A Megatron-Core model, whatever its layout, as Hugging Face tensors on global rank 0, one at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

from megatron_fr.models import local
from megatron_fr.models.local import Placement
from megatron_fr.models.mappings import WeightMapping
from megatron_fr.models.sizes import Sizes
from megatron_fr.models.spec import MappedParameter, ModelSpec


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return prod(self.shape) * self.dtype.itemsize


def hf_tensor_specs(spec: ModelSpec, dtype: torch.dtype) -> list[TensorSpec]:
    """Every Hugging Face tensor of the model in the order of :func:`iter_hf_tensors`. No collective.

    Tensors that engines load as one (q, k and v; gate and up) follow each other.

    Args:
        dtype: of the parameters.
    """
    return [
        TensorSpec(name, shape, entry.mapping.dtype or dtype)
        for entry in spec.parameters()
        for name, shape in zip(entry.hf, entry.mapping.hf_shapes(spec), strict=True)
    ]


@torch.no_grad()
def iter_hf_tensors(chunks: Sequence[torch.nn.Module], spec: ModelSpec) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield ``(name, tensor)``: on global rank 0 the whole tensor in the parameters' dtype on its device, else None.

    A collective: every rank iterates to the end. One parameter of the whole model is in memory at a time, and of each
    shard exactly one holder sends it (none where rank 0 holds it). A tensor may share memory with a parameter: use it
    before the next optimizer step, and do not write to it.
    """
    rank = dist.get_rank()
    held = local.parameters(chunks)
    example = next(iter(held.values()))
    places: list[Placement] = [None] * dist.get_world_size()  # type: ignore[list-item]
    dist.all_gather_object(places, local.placement(chunks))
    for entry in spec.parameters():
        sources = _sources(entry, places)
        if rank == 0:
            shards = [
                held[entry.param].data
                if source == 0
                else _receive(source, shard_shape(entry.mapping, spec, len(sources)), example, entry.mapping.dtype)
                for source in sources
            ]
            yield from zip(entry.hf, entry.mapping.gather(shards, spec), strict=True)
        else:
            if rank in sources:
                dist.send(held[entry.param].data.contiguous(), dst=0)
            yield from ((name, None) for name in entry.hf)


def _sources(entry: MappedParameter, places: Sequence[Placement]) -> list[int]:
    """The lowest global rank that holds each shard of ``entry``, in TP rank order; one rank where all hold the same."""
    by_shard: dict[int, int] = {}
    size = 1
    for rank, place in enumerate(places):
        if not _holds(place, entry):
            continue
        shard, size = place.tp_rank, place.tp_size
        if entry.mapping.per_expert:
            shard, size = place.expert_tp_rank, place.expert_tp_size
        by_shard.setdefault(shard, rank)
    if entry.mapping.replicated:
        return [min(by_shard.values())]
    return [by_shard[shard] for shard in range(size)]


def _holds(place: Placement, entry: MappedParameter) -> bool:
    if entry.layer is None:
        return place.has_embedding if entry.param.startswith("embedding.") else place.has_head
    return entry.layer in place.layers and (entry.expert is None or entry.expert in place.experts)


def _receive(source: int, shape: tuple[int, ...], example: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    shard = torch.empty(shape, dtype=dtype or example.dtype, device=example.device)
    dist.recv(shard, src=source)
    return shard


@functools.lru_cache(maxsize=256)
def shard_shape(mapping: WeightMapping, sizes: Sizes, size: int) -> tuple[int, ...]:
    """Shape of one rank's shard at TP ``size``; at size 1 of the whole parameter."""
    wholes = [torch.empty(shape, device="meta") for shape in mapping.hf_shapes(sizes)]
    return tuple(mapping.shard(wholes, sizes, 0, size).shape)
