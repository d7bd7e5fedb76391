"""Group a stream of named tensors into byte buckets of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch


@dataclass
class Bucket:
    """Tensors that travel as one broadcast: their bytes, one after the other.

    ``names``, ``dtypes`` (torch names without the prefix) and ``shapes`` are what the receiver needs to cut it up.
    """

    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append one tensor."""
        self.names.append(name)
        self.dtypes.append(str(tensor.dtype).removeprefix("torch."))
        self.shapes.append(list(tensor.shape))
        self.tensors.append(tensor)
        self.num_bytes += tensor.numel() * tensor.element_size()

    def payload(self) -> torch.Tensor:
        """uint8 ``[num_bytes]``; frees the tensors."""
        flat = torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in self.tensors])
        self.tensors = []
        return flat


def buckets(named: Iterable[tuple[str, torch.Tensor]], *, max_bytes: int) -> Iterator[Bucket]:
    """Fill buckets in order. A tensor never spans two buckets; one larger than ``max_bytes`` gets its own.

    A bucket holds one dtype, so that every tensor in it starts at a multiple of its element size.
    """
    current = Bucket()
    for name, tensor in named:
        size = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        if current.names and (current.num_bytes + size > max_bytes or current.dtypes[-1] != dtype):
            yield current
            current = Bucket()
        current.add(name, tensor)
    if current.names:
        yield current
