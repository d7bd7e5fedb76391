"""A reader of torch_dist checkpoints that notices changed bytes and runs no code of theirs; without Megatron-Core."""

from __future__ import annotations

import pickle
from io import BytesIO
from typing import Any
from zipfile import ZipFile

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from megatron_fr.errors import CheckpointError

#: What the metadata of a checkpoint consists of, by module.
_KNOWN = {
    "torch": ["Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))],
    "torch.serialization": ["_get_layout"],
    "pathlib": ["Path", "PosixPath"],
    "torch.distributed.checkpoint.metadata": [
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    ],
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    "torch.distributed.checkpoint.planner": ["SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"],
}


class _Unpickler(pickle.Unpickler):
    """Loads a checkpoint's metadata and calls nothing else: a pickle may name any function of any module."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class CheckedReader(FileSystemReader):
    """Compares what it reads with the sums that torch stores and does not look at itself."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """As torch's, which would call whatever a folder from elsewhere names."""
        with self.fs.create_stream(self._get_metadata_path(), "rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        return metadata

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        piece = BytesIO(super()._slice_file(file, sinfo).read(-1))  # a zip file cannot be read through torch's view
        if ZipFile(piece).testzip() is not None:
            raise CheckpointError(f"{sinfo.relative_path} has another content than was written")
        piece.seek(0)
        return piece
