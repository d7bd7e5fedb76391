"""Safetensors files read and written piece by piece, without mapping them into memory.

A file is 8 bytes with the little-endian length of a JSON header, the header (names, dtypes, shapes, and where each
tensor's bytes begin and end), and the bytes. Plain reads keep the host memory of a conversion at the tensors in hand:
pages of a mapped file would count as the process's own.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from megatron_fr.errors import ModelError
from megatron_fr.hf.extents import Extent, copy_extents, reason, write_all, writing

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


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @functools.cached_property
    def num_bytes(self) -> int:
        """Size of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


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
            if not isinstance(header, dict):
                raise ValueError(f"its header holds {type(header).__name__}, expected an object")
            header.pop("__metadata__", None)
            self._specs = {
                name: TensorSpec(name, _sizes(entry["shape"]), _DTYPES[entry["dtype"]])
                for name, entry in header.items()
            }
            ends = {name: _sizes(entry["data_offsets"]) for name, entry in header.items()}
            self._start = {name: 8 + length + start for name, (start, _) in ends.items()}
            stop = {name: 8 + length + end for name, (_, end) in ends.items()}
        except (ValueError, KeyError, TypeError) as error:
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

    def extent(self, name: str, start: int, stop: int) -> Extent:
        """Where the bytes of rows ``start`` to ``stop`` lie."""
        spec = self._specs[name]
        row = spec.num_bytes // max(1, spec.shape[0] if spec.shape else 1)
        return Extent(self.path, self._file.fileno(), self._start[name] + start * row, (stop - start) * row, name)

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
        self.extent(name, start, stop).read_into(memoryview(out.reshape(-1).view(torch.uint8).numpy()))
        return out

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _sizes(numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"its header has {numbers!r} where sizes belong")
    return tuple(numbers)


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

    def extent(self, start: int, stop: int) -> Extent:
        """Where the bytes of rows ``start`` to ``stop`` lie."""
        return self.file.extent(self.name, start, stop)

    def get_shape(self) -> list[int]:
        """The whole tensor's shape."""
        return list(self.file.spec(self.name).shape)


class TensorFileWriter:
    """Writes one safetensors file, a tensor at a time in the order of ``specs``; a context manager.

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
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise ModelError(f"{path} cannot be written: {reason(error)}") from error
        self._write("the header", len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor; its name, shape and dtype must be those announced."""
        spec = self._pending.pop()
        if (name, tuple(tensor.shape), tensor.dtype) != (spec.name, spec.shape, spec.dtype):
            raise ValueError(f"{self.path}: got {name!r} {tuple(tensor.shape)} {tensor.dtype}, expected {spec}")
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._write(f"tensor {name!r}", memoryview(data))

    def copy(self, name: str, extents: Iterable[Extent]) -> None:
        """Append the next tensor, whose bytes are those of the ranges.

        Raises:
            ModelError: also where a range cannot be read.
        """
        spec = self._pending.pop()
        with self._writing(f"tensor {name!r}"):
            count = copy_extents(extents, self._file)
        if (name, count) != (spec.name, spec.num_bytes):
            raise ValueError(f"{self.path}: got {count} bytes of {name!r}, expected {spec}")

    def _write(self, what: str, data: bytes | memoryview) -> None:
        with self._writing(what):
            write_all(self._file, data)

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        with writing(self.path, what):
            try:
                yield
            except OSError:
                self._file.close()
                raise

    def close(self) -> None:
        """Close the file and check that every tensor was written."""
        try:
            self._file.close()
        except OSError as error:  # a quota, or a network's file system that had kept bytes back
            raise ModelError(f"{self.path} cannot be written: {error.strerror}") from error
        if self._pending:
            raise ValueError(f"{self.path}: {len(self._pending)} tensors were announced and not written")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()
