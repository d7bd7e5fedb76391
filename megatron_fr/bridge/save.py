"""A Megatron-Core model as a complete Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megatron_fr.bridge.export import TensorSpec, hf_tensor_specs, iter_hf_tensors
from megatron_fr.bridge.folder import INDEX_NAME, SINGLE_NAME, resolve_folder
from megatron_fr.errors import ModelError

#: Configuration, generation configuration, tokenizer and chat template; not weights, and not their index.
_COPIED_SUFFIXES = (".json", ".txt", ".jinja", ".model", ".tiktoken")


def save_hf_folder(
    chunks: Sequence[torch.nn.Module],
    hf_config: Any,
    source_dir: str | Path,
    out_dir: str | Path,
    *,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Write ``out_dir``: safetensors files of at most ``shard_bytes``, and the other files of ``source_dir``.

    A collective; rank 0 writes. Weights get the dtype that ``source_dir``'s configuration states. The folder appears
    whole or not at all: it is written beside ``out_dir`` and renamed, and a folder that was there is replaced.

    Raises:
        ModelError: on every rank, when rank 0 could not write.
    """
    tensors = iter_hf_tensors(chunks, hf_config)
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            _write(tensors, hf_config, resolve_folder(source_dir), Path(out_dir), shard_bytes)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure[0] = f"{type(error).__name__}: {error}"
    for _ in tensors:  # all of them on other ranks; on rank 0 what a failure left over, so that no sender waits
        pass
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise ModelError(f"the model could not be written to {out_dir}: {failure[0]}")


def _write(tensors: Any, hf_config: Any, source: Path, out: Path, shard_bytes: int) -> None:
    dtype = _stated_dtype(source)
    specs = hf_tensor_specs(hf_config, dtype or torch.float32)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        files = _plan(specs, shard_bytes)
        for name, members in files.items():
            batch: dict[str, torch.Tensor] = {}
            for spec in members:
                hf_name, tensor = next(tensors)
                assert hf_name == spec.name
                batch[hf_name] = tensor.to("cpu", dtype or tensor.dtype).contiguous()
            save_file(batch, work / name, metadata={"format": "pt"})
        if len(files) > 1:
            weight_map = {spec.name: name for name, members in files.items() for spec in members}
            index = {"metadata": {"total_size": sum(spec.num_bytes for spec in specs)}, "weight_map": weight_map}
            (work / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
        for file in sorted(source.iterdir()):
            if file.is_file() and file.suffix in _COPIED_SUFFIXES and not file.name.endswith(".index.json"):
                shutil.copyfile(file, work / file.name)
        work.chmod(0o755)
        _replace(work, out)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _plan(specs: Sequence[TensorSpec], shard_bytes: int) -> dict[str, list[TensorSpec]]:
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


def _stated_dtype(folder: Path) -> torch.dtype | None:
    config = json.loads((folder / "config.json").read_text())
    name = config.get("dtype") or config.get("torch_dtype")
    return getattr(torch, name) if name else None


def _replace(work: Path, out: Path) -> None:
    """Rename ``work`` to ``out``; what was there goes last, so that one of the two always exists."""
    old = work.with_name(work.name + ".old")
    if out.exists():
        os.rename(out, old)
    os.rename(work, out)
    shutil.rmtree(old, ignore_errors=True)
