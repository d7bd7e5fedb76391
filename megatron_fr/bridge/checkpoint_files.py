"""Whole tensors out of a Megatron torch_dist checkpoint, one at a time, whatever layout wrote it; no process group."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_fr.errors import ModelError

METADATA_NAME = ".metadata"


def find_checkpoint(path: str | Path) -> Path:
    """The torch_dist folder at ``path``, or the only one below it.

    Raises:
        ModelError: there is none, or more than one.
    """
    path = Path(path)
    found = [path] if (path / METADATA_NAME).is_file() else sorted(file.parent for file in path.rglob(METADATA_NAME))
    if len(found) == 1:
        return found[0]
    if not found:
        raise ModelError(f"{path} holds no Megatron checkpoint: no {METADATA_NAME} in it; was it saved to the end?")
    raise ModelError(f"{path} holds {len(found)} checkpoints; choose one, such as {found[-1]}")


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
        self._check_sizes()

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
        inner = tuple(entry.size)[len(lead) :]
        if len(inner) != len(shape) or inner[0] < shape[0] or inner[1:] != tuple(shape[1:]):
            raise ModelError(f"{self.folder}: tensor {key!r} has shape {inner}, config.json implies {tuple(shape)}")
        out = torch.empty(tuple(shape), dtype=entry.properties.dtype)
        filled = 0
        for chunk in self._pieces(key, lead):
            start = tuple(chunk.offsets)[len(lead) :]
            length = min(tuple(chunk.sizes)[len(lead)], shape[0] - start[0])
            if length <= 0:
                continue
            piece = self._load(key, tuple(chunk.offsets)).reshape(tuple(chunk.sizes)[len(lead) :])[:length]
            target = out[start[0] : start[0] + length]
            for axis in range(1, len(shape)):
                target = target.narrow(axis, start[axis], piece.shape[axis])
            target.copy_(piece)
            filled += piece.numel()
        if filled != out.numel():
            raise ModelError(
                f"{self.folder}: tensor {key!r} at {lead} has {filled} of {out.numel()} elements; pieces are missing"
            )
        return out

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

    def _load(self, key: str, offset: tuple[int, ...]) -> torch.Tensor:
        from torch.distributed.checkpoint.utils import _create_file_view

        info = self._places[key, offset]
        path = self.folder / info.relative_path
        try:
            file = self._open.get(info.relative_path) or path.open("rb", buffering=0)
            self._open[info.relative_path] = file
            view: Any = _create_file_view(file, info.offset, info.length)
            loaded: torch.Tensor = torch.load(view, map_location="cpu", weights_only=True)
        except Exception as error:  # on damaged bytes zip, pickle and torch raise a dozen kinds
            raise ModelError(f"{path}: tensor {key!r} cannot be read: {error}; use another checkpoint") from error
        return loaded

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()
