"""A Megatron-Core model as a complete Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fr.errors import ModelError
from megatron_fr.hf.atomic import atomic_folder
from megatron_fr.hf.export import hf_tensor_specs, iter_hf_tensors
from megatron_fr.hf.folder import INDEX_NAME, SINGLE_NAME, copy_other_files, resolve_folder, stated_dtype
from megatron_fr.hf.tensor_file import TensorFileWriter, TensorSpec
from megatron_fr.models.spec import ModelSpec


def save_hf_folder(
    chunks: Sequence[torch.nn.Module],
    spec: ModelSpec,
    source_dir: str | Path,
    out_dir: str | Path,
    *,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Write ``out_dir``: safetensors files of at most ``shard_bytes``, and the other files of ``source_dir``.

    A collective; rank 0 writes, one tensor in memory at a time. Weights get the dtype that ``source_dir``'s
    configuration states. The folder appears whole or not at all: it is written beside ``out_dir`` and renamed, and a
    folder that was there is replaced.

    Raises:
        ModelError: on every rank, when rank 0 could not write.
    """
    tensors = iter_hf_tensors(chunks, spec)
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            source = resolve_folder(source_dir, weights=False)
            dtype = stated_dtype(source) or next(chunks[0].parameters()).dtype
            _write(tensors, hf_tensor_specs(spec, dtype), source, Path(out_dir), shard_bytes)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure[0] = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
    for _ in tensors:  # all of them on other ranks; on rank 0 what a failure left over, so that no sender waits
        pass
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise ModelError(f"the model could not be written to {out_dir}: {failure[0]}")


def _write(tensors: Any, specs: list[TensorSpec], source: Path, out: Path, shard_bytes: int) -> None:
    with atomic_folder(out, overwrite=True) as work:
        files = plan_files(specs, shard_bytes)
        for file, members in files.items():
            writer = TensorFileWriter(work / file, members)
            for member in members:
                name, tensor = next(tensors)
                assert name == member.name
                writer.write(name, tensor.to("cpu", member.dtype))
            writer.close()
        write_index(work, files)
        copy_other_files(source, work)


def write_index(folder: Path, files: dict[str, list[TensorSpec]]) -> None:
    """Write the index of several weight files; nothing for a single one.

    Raises:
        ModelError: it could not be written.
    """
    if len(files) == 1:
        return
    total = sum(spec.num_bytes for members in files.values() for spec in members)
    weight_map = {spec.name: name for name, members in files.items() for spec in members}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
    try:
        (folder / INDEX_NAME).write_text(text)
    except OSError as error:
        raise ModelError(f"{folder / INDEX_NAME} cannot be written: {error.strerror}") from error


def plan_files(specs: Sequence[TensorSpec], shard_bytes: int) -> dict[str, list[TensorSpec]]:
    """File names and their tensors, in order; a tensor larger than ``shard_bytes`` has a file of its own."""
    shards: list[list[TensorSpec]] = [[]]
    room = shard_bytes
    for spec in specs:
        if shards[-1] and spec.num_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(spec)
        room -= spec.num_bytes
    if len(shards) == 1:
        return {SINGLE_NAME: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}
