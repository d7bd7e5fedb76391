"""The weights of a Hugging Face folder: safetensors files and their index.

Files are mapped, not read: a tensor, and a slice of one, costs memory only for the pages that are used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_fr.errors import ModelError
from megatron_fr.hf.export import TensorSpec, hf_tensor_specs
from megatron_fr.models.spec import ModelSpec

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
#: Ends the names of what a folder of float8 weights holds besides the model's tensors.
SCALE_SUFFIX = "_scale"
#: Stored by some exporters, and computed here.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"


class WeightFiles:
    """The tensors of a folder by name; a context manager.

    Raises:
        ModelError: no weight file, a missing or damaged one, or an index that does not match the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        named: dict[str, str] = {}
        if (folder / INDEX_NAME).is_file():
            named = _weight_map(folder / INDEX_NAME)
        elif not (folder / SINGLE_NAME).is_file():
            raise ModelError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}; convert the weights to safetensors")
        self._files = ExitStack()
        self._file_of: dict[str, tuple[str, Any]] = {}
        with ExitStack() as opened:
            for file in sorted(set(named.values())) or [SINGLE_NAME]:
                handle = opened.enter_context(_open(folder / file))
                self._file_of |= dict.fromkeys(handle.keys(), (file, handle))
            for tensor, file in named.items():
                if tensor not in self._file_of or self._file_of[tensor][0] != file:
                    raise ModelError(f"{folder / file} does not hold {tensor!r}, which {INDEX_NAME} says it does")
            self._files = opened.pop_all()

    @property
    def names(self) -> set[str]:
        """All tensors in the files."""
        return set(self._file_of)

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.folder / self._file_of[name][0]

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in its mapped file: use it before the files are closed, and do not write to it."""
        tensor: torch.Tensor = self._file_of[name][1].get_tensor(name)
        return tensor

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype."""
        tensor = self.tensor(name)
        return TensorSpec(name, tuple(tensor.shape), tensor.dtype)

    def close(self) -> None:
        """Close the files."""
        self._file_of.clear()
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing, though {INDEX_NAME} names it; fetch the folder again") from error
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} is damaged or incomplete ({error}); fetch it again") from error


def _weight_map(index: Path) -> dict[str, str]:
    try:
        named = json.loads(index.read_text())["weight_map"]
        if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
            raise ValueError("weight_map is no object of file names")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{index} is damaged: {error}; fetch the folder again") from error
    return named


def open_weights(folder: Path, spec: ModelSpec, *, quantized: bool = False) -> WeightFiles:
    """Open a folder whose tensors have the names and shapes that the configuration implies.

    Args:
        quantized: scales may be there too.

    Raises:
        ModelError: names the file and the tensor that is missing, left over, damaged or of another shape.
    """
    files = WeightFiles(folder)
    expected = {tensor.name: tensor.shape for tensor in hf_tensor_specs(spec, torch.float32)}
    if missing := [name for name in expected if name not in files.names]:
        raise ModelError(f"{folder}: {len(missing)} tensors are missing, among them {missing[0]!r}")
    allowed = expected.keys() | ({"lm_head.weight"} if spec.tie else set())
    ignored = [name for name in files.names if name.endswith(_IGNORED_SUFFIX) or name.startswith(spec.unused_tensors)]
    left_over = sorted(files.names - allowed - set(ignored))
    scales = [name for name in left_over if name.endswith(SCALE_SUFFIX)]
    if scales and not quantized:
        raise ModelError(
            f"{files.file(scales[0])}: tensor {scales[0]!r} is the scale of a quantised one; give the folder that was "
            "quantised"
        )
    if others := [name for name in left_over if name not in scales]:
        raise ModelError(
            f"{files.file(others[0])}: nothing uses tensor {others[0]!r} ({len(others)} such tensors); "
            "the folder's config.json describes another model"
        )
    for name, shape in expected.items():
        if files.spec(name).shape != shape:
            raise ModelError(
                f"{files.file(name)}: tensor {name!r} has shape {files.spec(name).shape}, config.json implies {shape}"
            )
    return files


def write_weights(
    folder: Path, specs: Sequence[TensorSpec], tensors: Iterator[tuple[str, torch.Tensor]], shard_bytes: int
) -> None:
    """Write the tensors that ``specs`` announce, in its order and dtypes, with an index where there are several files.

    One file's tensors are in memory at a time.

    Raises:
        OSError, SafetensorError: a file cannot be written; :func:`~megatron_fr.hf.atomic.atomic_folder` explains them.
    """
    files = plan_files(specs, shard_bytes)
    for file, members in files.items():
        shard: dict[str, torch.Tensor] = {}
        for spec in members:
            name, tensor = next(tensors)
            assert (name, tuple(tensor.shape)) == (spec.name, spec.shape), name
            # A copy: a view of a layer's experts would keep all of them in memory.
            shard[name] = tensor.to("cpu", spec.dtype, copy=True).contiguous()
        save_file(shard, folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        total = sum(spec.num_bytes for spec in specs)
        weight_map = {spec.name: file for file, members in files.items() for spec in members}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


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
