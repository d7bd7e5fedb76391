"""Safetensors files read and written piece by piece, without mapping them into memory.

A file is 8 bytes with the little-endian length of a JSON header, the header (names, dtypes, shapes, and where each
tensor's bytes begin and end), and the bytes. Plain reads keep the host memory of a conversion at the tensors in hand:
pages of a mapped file would count as the process's own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_fr.errors import ModelError

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 8
_MAX_HEADER = 100_000_000
_MAX_READ = 1 << 30  # the kernel reads at most 2 GiB at a time


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorFile:
    """One safetensors file, open for reading.

    Raises:
        ModelError: the file is missing, is no such file, or ends before its tensors do; names the file and, where one
            tensor is cut off, the tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise ModelError(f"{path} cannot be opened ({error.strerror}); fetch the folder again") from error
        size = os.fstat(self._file.fileno()).st_size
        try:
            length = int.from_bytes(self._file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise ValueError("its header is cut off or no header at all")
            header: dict[str, Any] = json.loads(self._file.read(length))
            header.pop("__metadata__", None)
            self._specs = {
                name: TensorSpec(name, tuple(entry["shape"]), _DTYPES[entry["dtype"]]) for name, entry in header.items()
            }
            self._start = {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}
            stop = {name: 8 + length + entry["data_offsets"][1] for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ModelError(f"{path} is damaged or incomplete ({error}); fetch it again") from error
        for name, spec in self._specs.items():
            if stop[name] > size:
                raise ModelError(
                    f"{path} is damaged or incomplete: tensor {name!r} should end at byte {stop[name]}, "
                    f"the file has {size}; fetch it again"
                )
            if stop[name] - self._start[name] != spec.num_bytes:
                raise ModelError(
                    f"{path} is damaged or incomplete: tensor {name!r} of shape {spec.shape} takes {spec.num_bytes} "
                    f"bytes, its header says {stop[name] - self._start[name]}; fetch it again"
                )

    @property
    def names(self) -> list[str]:
        """All tensors, in the header's order."""
        return list(self._specs)

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype of a tensor."""
        return self._specs[name]

    def slice(self, name: str) -> TensorSlice:
        """A view that reads what is indexed."""
        return TensorSlice(self, name)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` (of the first axis); a scalar is a row of its own.

        Raises:
            ModelError: names the file and the tensor that could not be read.
        """
        spec = self._specs[name]
        shape = (stop - start, *spec.shape[1:]) if spec.shape else ()
        out = torch.empty(shape, dtype=spec.dtype)
        if out.numel() == 0:
            return out
        row = spec.num_bytes // max(1, spec.shape[0] if spec.shape else 1)
        buffer = memoryview(out.reshape(-1).view(torch.uint8).numpy())
        position = self._start[name] + start * row
        while buffer:
            try:
                count = os.preadv(self._file.fileno(), [buffer[:_MAX_READ]], position)
            except OSError as error:
                raise ModelError(f"{self.path}: tensor {name!r} cannot be read ({error.strerror})") from error
            if count == 0:
                raise ModelError(f"{self.path}: tensor {name!r} ends early; the file was cut while it was read")
            buffer, position = buffer[count:], position + count
        return out

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True)
class TensorSlice:
    """What ``file.slice(name)`` gives: ``[:]``, ``[rows]`` and ``[rows, columns]`` with plain slices read that part.

    Columns are cut from their rows after reading.
    """

    file: TensorFile
    name: str

    def __getitem__(self, index: Any) -> torch.Tensor:
        shape = self.file.spec(self.name).shape
        first, *others = index if isinstance(index, tuple) else (index,)
        start, stop, step = first.indices(shape[0] if shape else 1)
        assert step == 1
        rows = self.file.read_rows(self.name, start, max(start, stop))
        return rows[(slice(None), *others)].contiguous() if others else rows

    def get_shape(self) -> list[int]:
        """The whole tensor's shape."""
        return list(self.file.spec(self.name).shape)


class TensorFileWriter:
    """Writes one safetensors file, a tensor at a time in the order of ``specs``.

    Raises:
        ModelError: the disk is full or the file cannot be written; names the file and the tensor.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self.path = path
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for spec in specs:
            header[spec.name] = {
                "dtype": _NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [position, position + spec.num_bytes],
            }
            position += spec.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._pending = list(reversed(specs))
        self._write("the header", len(text).to_bytes(8, "little") + text, "wb")

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor; its name, shape and dtype must be those announced."""
        spec = self._pending.pop()
        if (name, tuple(tensor.shape), tensor.dtype) != (spec.name, spec.shape, spec.dtype):
            raise ValueError(f"{self.path}: got {name!r} {tuple(tensor.shape)} {tensor.dtype}, expected {spec}")
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._write(f"tensor {name!r}", memoryview(data), "ab")

    def _write(self, what: str, data: bytes | memoryview, mode: str) -> None:
        try:
            with self.path.open(mode, buffering=0) as file:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest[:_MAX_READ]) :]
        except OSError as error:
            raise ModelError(f"{self.path}: {what} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Check that every tensor was written."""
        if self._pending:
            raise ValueError(f"{self.path}: {len(self._pending)} tensors were announced and not written")
