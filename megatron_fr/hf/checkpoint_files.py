"""Whole tensors out of a Megatron torch_dist checkpoint, one at a time, whatever layout wrote it; no process group."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_fr.checkpoint.store import MANIFEST_FILE, find_damage
from megatron_fr.errors import ModelError
from megatron_fr.hf.archive import PayloadFinder
from megatron_fr.hf.extents import Extent, ExtentReader, reason

METADATA_NAME = ".metadata"


def find_checkpoint(path: str | Path) -> Path:
    """The torch_dist folder at ``path``, or the only one below it, not counting hidden folders (unfinished writes).

    Raises:
        ModelError: there is none, or more than one.
    """
    path = Path(path)
    found = [path]
    if not (path / METADATA_NAME).is_file():
        below = sorted(file.parent for file in path.rglob(METADATA_NAME))
        found = [folder for folder in below if not any(p.startswith(".") for p in folder.relative_to(path).parts)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ModelError(f"{path} holds no Megatron checkpoint: no {METADATA_NAME} in it; was it saved to the end?")
    raise ModelError(f"{path} holds {len(found)} checkpoints; choose one, such as {found[-1]}")


def check_sums(checkpoint: Path) -> bool:
    """Compare every file of a training checkpoint, with the size in its ``manifest.json``.

    Returns:
        whether it has a manifest; checkpoints of weights alone have none.

    Raises:
        ModelError: names the checkpoint and the file that is missing or another.
    """
    if not (checkpoint / MANIFEST_FILE).is_file():
        return False
    if (reason := find_damage(checkpoint)) is not None:
        raise ModelError(f"{checkpoint} is damaged: {reason}; use another checkpoint")
    return True


@dataclass(frozen=True)
class StoredRows:
    """Where the rows of a parameter lie: ``(first row, row after the last, bytes)`` of each piece in order."""

    pieces: list[tuple[int, int, Extent]]
    row_bytes: int

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        """The bytes of rows ``start`` to ``stop``."""
        for first, last, whole in self.pieces:
            begin, end = max(first, start), min(last, stop)
            if begin < end:
                offset, length = whole.offset + (begin - first) * self.row_bytes, (end - begin) * self.row_bytes
                yield replace(whole, offset=offset, length=length)


class CheckpointFiles:
    """The tensors of a checkpoint by key.

    Attributes:
        tensors: key to whole shape, dtype and pieces.

    Raises:
        ModelError: its ``.metadata`` is damaged, or a file that it names is missing or shorter than it says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            with (folder / METADATA_NAME).open("rb") as file:
                metadata = pickle.load(file)  # torch's own format; it holds classes of torch.distributed.checkpoint
            self._storage: dict[MetadataIndex, Any] = metadata.storage_data
            self.tensors: dict[str, TensorStorageMetadata] = {
                key: entry
                for key, entry in metadata.state_dict_metadata.items()
                if isinstance(entry, TensorStorageMetadata)
            }
        except Exception as error:  # unpickling damaged bytes raises whatever it meets
            raise ModelError(f"{folder / METADATA_NAME} is damaged: {error}; use another checkpoint") from error
        self._places: dict[tuple[str, tuple[int, ...]], Any] = {
            (index.fqn, tuple(index.offset)): info for index, info in self._storage.items() if index.offset is not None
        }
        self._rows: dict[tuple[str, int], dict[tuple[int, ...], list[Any]]] = {}
        self._open: dict[str, BinaryIO] = {}
        self._finder = PayloadFinder()
        self._check_sizes()

    def reopened(self) -> CheckpointFiles:
        """The same checkpoint with files of its own, for another thread; its metadata is not read again."""
        other = copy.copy(self)
        other._open, other._finder = {}, PayloadFinder()
        return other

    def _check_sizes(self) -> None:
        needed: dict[str, tuple[int, str]] = {}
        for index, info in self._storage.items():
            needed[info.relative_path] = max(
                needed.get(info.relative_path, (0, "")), (info.offset + info.length, index.fqn)
            )
        for name, (size, tensor) in needed.items():
            path = self.folder / name
            if not path.is_file():
                raise ModelError(f"{path} is missing; it holds {tensor!r} among others; use another checkpoint")
            if path.stat().st_size < size:
                raise ModelError(f"{path} is cut off: tensor {tensor!r} should end at byte {size}")

    def read(self, key: str, lead: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Rows from the first of the part of a tensor at ``lead``, as many as ``shape`` says.

        A vocabulary is padded in a checkpoint, so that fewer rows may be asked for than there are.

        Raises:
            ModelError: the shapes do not fit, or pieces are missing or damaged; names the file and the tensor.
        """
        entry, lead = self.tensors[key], tuple(lead)
        self._check_shape(key, lead, shape)
        out = torch.empty(tuple(shape), dtype=entry.properties.dtype)
        filled = 0
        for chunk in self._pieces(key, lead):
            start = tuple(chunk.offsets)[len(lead) :]
            length = min(tuple(chunk.sizes)[len(lead)], shape[0] - start[0])
            if length <= 0:
                continue
            piece = self._load(key, tuple(chunk.offsets), tuple(chunk.sizes))
            piece = piece.reshape(tuple(chunk.sizes)[len(lead) :])[:length]
            target = out[start[0] : start[0] + length]
            for axis in range(1, len(shape)):
                target = target.narrow(axis, start[axis], piece.shape[axis])
            target.copy_(piece)
            filled += piece.numel()
        if filled != out.numel():
            raise self._incomplete(key, lead, f"{filled} of {out.numel()} elements")
        return out

    def rows(self, key: str, lead: Sequence[int], shape: Sequence[int]) -> StoredRows | None:
        """Where the bytes lie of what :meth:`read` would give; None where a piece has not whole rows, row after row.

        Raises:
            ModelError: as :meth:`read`.
        """
        lead, itemsize = tuple(lead), self.tensors[key].properties.dtype.itemsize
        self._check_shape(key, lead, shape)
        pieces, expected = [], 0
        for chunk in sorted(self._pieces(key, lead), key=lambda chunk: tuple(chunk.offsets)):
            start, sizes = tuple(chunk.offsets)[len(lead)], tuple(chunk.sizes)[len(lead) :]
            if start >= shape[0]:
                continue
            if sizes[1:] != tuple(shape[1:]):
                return None
            found = self._payload(key, tuple(chunk.offsets), tuple(chunk.sizes))
            if found is None:
                return None
            if start != expected:
                break
            pieces.append((start, start + sizes[0], found))
            expected = start + sizes[0]
        if expected < shape[0]:
            raise self._incomplete(key, lead, f"rows 0 to {expected} of {shape[0]}")
        return StoredRows(pieces, torch.Size(shape[1:]).numel() * itemsize)

    def _check_shape(self, key: str, lead: tuple[int, ...], shape: Sequence[int]) -> None:
        inner = tuple(self.tensors[key].size)[len(lead) :]
        if len(inner) != len(shape) or inner[0] < shape[0] or inner[1:] != tuple(shape[1:]):
            raise ModelError(f"{self.folder}: tensor {key!r} has shape {inner}, config.json implies {tuple(shape)}")

    def _incomplete(self, key: str, lead: tuple[int, ...], found: str) -> ModelError:
        return ModelError(f"{self.folder}: tensor {key!r} at {lead} has {found}; pieces are missing")

    def _pieces(self, key: str, lead: tuple[int, ...]) -> list[Any]:
        cached = self._rows.get((key, len(lead)))
        if cached is None:
            cached = defaultdict(list)
            for chunk in self.tensors[key].chunks:
                if any(size != 1 for size in tuple(chunk.sizes)[: len(lead)]):
                    raise ModelError(f"{self.folder}: tensor {key!r} is stored in pieces of several layers or experts")
                cached[tuple(chunk.offsets)[: len(lead)]].append(chunk)
            self._rows[key, len(lead)] = cached
        return cached.get(lead, [])

    def _load(self, key: str, offset: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        if (payload := self._payload(key, offset, sizes)) is not None:
            out = torch.empty(sizes, dtype=self.tensors[key].properties.dtype)
            payload.read_into(memoryview(out.reshape(-1).view(torch.uint8).numpy()))
            return out
        with self._reader(key, offset) as reader:
            loaded: torch.Tensor = torch.load(reader, map_location="cpu", weights_only=True)
        return loaded

    def _payload(self, key: str, offset: tuple[int, ...], sizes: tuple[int, ...]) -> Extent | None:
        dtype = self.tensors[key].properties.dtype
        with self._reader(key, offset) as reader:
            stored = reader.extent
            start = self._finder.offset(reader, stored.length, sizes, dtype)
            if start is None:
                return None
            length = torch.Size(sizes).numel() * dtype.itemsize
            if start + length > stored.length:
                raise ValueError(f"its {length} bytes do not fit where they are said to be")
        return replace(stored, offset=stored.offset + start, length=length)

    @contextmanager
    def _reader(self, key: str, offset: tuple[int, ...]) -> Iterator[ExtentReader]:
        """A stored piece with its frame; what is raised meanwhile names the file and the tensor."""
        info = self._places[key, offset]
        path = self.folder / info.relative_path
        if info.relative_path not in self._open:
            try:
                self._open[info.relative_path] = path.open("rb", buffering=0)
            except OSError as error:
                raise ModelError(f"{path} cannot be opened: {reason(error)}") from error
        file = self._open[info.relative_path]
        reader = ExtentReader(Extent(path, file.fileno(), info.offset, info.length, key))
        try:
            yield reader
        except Exception as error:  # on damaged bytes zip, pickle and torch raise a dozen kinds
            if reader.failure is not None:
                raise reader.failure from error
            raise ModelError(f"{path}: tensor {key!r} cannot be read: {error}; use another checkpoint") from error

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()
