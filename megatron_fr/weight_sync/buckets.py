"""Group a stream of named tensors into buckets of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

Bucket = list[tuple[str, torch.Tensor]]


def buckets(named: Iterable[tuple[str, torch.Tensor]], *, max_bytes: int) -> Iterator[Bucket]:
    """Fill buckets in order. A tensor never spans two buckets; one larger than ``max_bytes`` gets its own.

    A bucket holds one dtype, so that every tensor in its bytes starts at a multiple of its element size.
    """
    held: Bucket = []
    size = 0
    for name, tensor in named:
        if held and (size + tensor.nbytes > max_bytes or held[-1][1].dtype != tensor.dtype):
            yield held
            held, size = [], 0
        held.append((name, tensor))
        size += tensor.nbytes
    if held:
        yield held


def take_bytes(bucket: Bucket) -> torch.Tensor:
    """The tensors' bytes one after the other, uint8 ``[n]``; empties the bucket, which frees the tensors."""
    flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in bucket])
    bucket.clear()
    return flat
