"""Transport ``disk``: rank 0 writes each version as a Hugging Face folder, which the engines load.

It serves engines that cannot join a process group with the trainer. Both see the folder under one path.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_fr.errors import ModelError, SyncError
from megatron_fr.hf.atomic import sync_path
from megatron_fr.hf.folder import copy_other_files
from megatron_fr.hf.weights import INDEX_NAME
from megatron_fr.weight_sync.buckets import buckets
from megatron_fr.weight_sync.transport import TransportContext


class DiskTransport:
    """Folders ``version-N`` in ``sync.folder``, of which the last two stay.

    A folder appears under its name when it is complete. An engine that cannot load it goes on with the weights it has.
    """

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._folder = (context.config.folder or context.output / "weight_sync").resolve()
        self._newest: Path | None = None

    def connect(self) -> None:
        """Make the folder, or raise SyncError."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._refusal(error) from error

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See :class:`~megatron_fr.weight_sync.transport.Transport`."""
        target = self._folder / f"version-{version:06d}"
        work = target.with_suffix(".tmp")
        try:
            for old in self._folder.glob("version-*"):  # also those of an earlier run
                if old != self._newest:
                    shutil.rmtree(old)
            work.mkdir()
            self._write(tensors, work)
            shutil.rmtree(target, ignore_errors=True)  # the same version pushed again
            os.rename(work, target)
        except (OSError, SafetensorError, ModelError) as error:
            raise self._refusal(error) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
        self._newest = target
        body = {"model_path": str(target), "weight_version": str(version), "flush_cache": False}
        self._context.engines.post("/update_weights_from_disk", body)

    def close(self) -> None:
        """Nothing to leave; the folders stay."""

    def _write(self, tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
        weight_map: dict[str, str] = {}
        for i, bucket in enumerate(buckets(tensors, max_bytes=self._context.config.bucket_mb * 2**20), start=1):
            path = folder / f"model-{i:05d}.safetensors"
            # Copies: tensors that share memory are refused, and views of a fused parameter do.
            copies = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in bucket}
            bucket.clear()
            save_file(copies, path, {"format": "pt"})
            sync_path(path)  # raises what a full or distant disk could not keep
            weight_map |= dict.fromkeys(copies, path.name)
        (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        copy_other_files(self._context.model_folder, folder)

    def _refusal(self, error: Exception) -> SyncError:
        return SyncError(
            f"weights cannot be written to {self._folder} ({error}); free disk space there, or set sync.folder to "
            "another folder that trainer and engines share"
        )
