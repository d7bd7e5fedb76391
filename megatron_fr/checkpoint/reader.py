"""A reader of torch_dist checkpoints that notices changed bytes. Imports no Megatron-Core."""

from __future__ import annotations

from io import BytesIO
from typing import Any
from zipfile import ZipFile

from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_fr.errors import CheckpointError


class CheckedReader(FileSystemReader):
    """Compares what it reads with the sums that torch stores and does not look at itself."""

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        piece = BytesIO(super()._slice_file(file, sinfo).read(-1))  # a zip file cannot be read through torch's view
        if ZipFile(piece).testzip() is not None:
            raise CheckpointError(f"{sinfo.relative_path} has another content than was written")
        piece.seek(0)
        return piece
