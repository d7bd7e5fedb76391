"""A Megatron-Core model, whatever its layout, as Hugging Face tensors on global rank 0, one at a time."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

from megatron_fr.models import local
from megatron_fr.models.mappings import Sizes, WeightMapping
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

    Tensors that engines load as one (q, k and v; gate and up) follow each other. ``dtype`` is that of the parameters.
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
    places: list[local.Placement] = [None] * dist.get_world_size()  # type: ignore[list-item]
    dist.all_gather_object(places, local.placement(chunks))
    for entry in spec.parameters():
        sources = _sources(entry, places)
        if rank == 0:
            shards = []
            for source in sources:
                if source == 0:
                    shards.append(held[entry.param].data)
                    continue
                shape = shard_shape(entry.mapping, spec, len(sources))
                shards.append(torch.empty(shape, dtype=entry.mapping.dtype or example.dtype, device=example.device))
                dist.recv(shards[-1], src=source)
            yield from zip(entry.hf, entry.mapping.gather(shards, spec), strict=True)
        else:
            if rank in sources:
                dist.send(held[entry.param].data.contiguous(), dst=0)
            yield from ((name, None) for name in entry.hf)


def _sources(entry: MappedParameter, places: Sequence[local.Placement]) -> list[int]:
    """The lowest global rank that holds each shard of ``entry``, in TP rank order; one rank where all hold the same."""
    by_shard: dict[int, int] = {}
    size = 1
    for rank, place in enumerate(places):
        if place.holds(entry):
            shard, size = place.shard(entry)
            by_shard.setdefault(shard, rank)
    return [min(by_shard.values())] if entry.mapping.replicated else [by_shard[shard] for shard in range(size)]


@functools.lru_cache(maxsize=256)
def shard_shape(mapping: WeightMapping, sizes: Sizes, size: int) -> tuple[int, ...]:
    """Shape of one rank's shard at TP ``size``; at size 1 of the whole parameter."""
    wholes = [torch.empty(shape, device="meta") for shape in mapping.hf_shapes(sizes)]
    return tuple(mapping.shard(wholes, sizes, 0, size).shape)
