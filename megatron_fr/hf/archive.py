"""The files that ``torch.save`` makes of one tensor, which is how torch_dist checkpoints store a piece.

Around the tensor's bytes there is nothing that depends on their values (as long as no checksum is asked for; loading
looks at none). So the bytes before and after them are made once for each shape and dtype, and a reader learns where
the bytes lie, without loading them.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy
import torch


@functools.lru_cache(maxsize=256)
def frame(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What ``torch.save`` writes before and after the bytes of a contiguous CPU tensor; they are never touched."""
    tensor = torch.empty(shape, dtype=dtype)
    around = _Around(tensor)
    crc = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor, around)
    finally:
        torch.serialization.set_crc32_options(crc)
    if around.skipped != tensor.nbytes:
        raise RuntimeError(f"torch.save wrote {around.skipped} of {tensor.nbytes} bytes of a tensor as they are")
    return b"".join(around.before), b"".join(around.after)


class _Around:
    """A stream that keeps all but the tensor's own memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._start, self._stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        self.before: list[bytes] = []
        self.after: list[bytes] = []
        self.skipped = 0

    def write(self, data: memoryview) -> int:
        if self._start <= numpy.frombuffer(data, numpy.uint8).ctypes.data < self._stop:
            self.skipped += len(data)
        else:
            (self.after if self.skipped else self.before).append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing is buffered."""


class PayloadFinder:
    """Finds the bytes of a stored tensor.

    They lie between the two parts of its frame, where it was written without checksums by this version of torch;
    otherwise the description beside them is read, in full once for each distinct one.
    """

    def __init__(self) -> None:
        self._plain: dict[tuple[bytes, tuple[int, ...], torch.dtype], bool] = {}

    def offset(self, stored: Any, length: int, shape: tuple[int, ...], dtype: torch.dtype) -> int | None:
        """Where in ``stored`` the row-major bytes of a tensor of ``shape`` and ``dtype`` begin.

        None where they do not lie there like that: another shape or dtype, strides, or another byte order.

        Args:
            stored: a file-like object of ``length`` bytes.

        Raises:
            RuntimeError and others of torch's: the file is damaged.
        """
        before, after = frame(shape, dtype)
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        usual = length == len(before) + nbytes + len(after)
        if usual and _is_framed(stored, length, before, after):
            return len(before)
        stored.seek(0)
        reader = torch._C.PyTorchFileReader(stored)
        key = (reader.get_record("data.pkl"), shape, dtype)
        if key not in self._plain:
            stored.seek(0)
            loaded: torch.Tensor = torch.load(stored, map_location="cpu", weights_only=True)
            order = reader.get_record("byteorder") if reader.has_record("byteorder") else b"little"
            self._plain[key] = (
                (tuple(loaded.shape), loaded.dtype) == (shape, dtype)
                and loaded.is_contiguous()
                and loaded.untyped_storage().nbytes() == loaded.nbytes
                and order.decode() == sys.byteorder
            )
        if not self._plain[key]:
            return None
        offset: int = reader.get_record_offset("data/0")
        if usual and offset != len(before):
            raise ValueError(f"its bytes begin at {offset}, in archives of its size at {len(before)}")
        return offset


def _is_framed(stored: Any, length: int, before: bytes, after: bytes) -> bool:
    stored.seek(0)
    if stored.read(len(before)) != before:
        return False
    stored.seek(length - len(after))
    return bool(stored.read(len(after)) == after)
