"""The weights of a Hugging Face folder: safetensors files and their index.

Files are mapped, not read: a tensor, and a slice of one, costs memory only for the pages that are used.
"""

import json
from collections.abc import Iterator, KeysView, Sequence
from pathlib import Path
from typing import Any

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
#: Largest weight file, and so the most that a writer holds of what it has not written.
SHARD_BYTES = 2 * 10**9
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Stored by some exporters, and computed here.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"


class WeightFiles:
    """The tensors of a folder by name.

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
        self._file_of: dict[str, tuple[str, Any]] = {}
        for file in sorted(set(named.values())) or [SINGLE_NAME]:
            handle = _open(folder / file)
            # Of a tensor in several files, as folders have that were laid over older ones, the index names the one.
            self._file_of |= {name: (file, handle) for name in handle.keys() if named.get(name, file) == file}  # noqa: SIM118
        for tensor, file in named.items():
            if tensor not in self._file_of:
                raise ModelError(f"{folder / file} does not hold {tensor!r}, which {INDEX_NAME} says it does")

    @property
    def names(self) -> KeysView[str]:
        """All tensors in the files."""
        return self._file_of.keys()

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.folder / self._file_of[name][0]

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in its mapped file; do not write to it."""
        tensor: torch.Tensor = self._file_of[name][1].get_tensor(name)
        return tensor

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype."""
        tensor = self.tensor(name)
        return TensorSpec(name, tuple(tensor.shape), tensor.dtype)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing, though {INDEX_NAME} names it; fetch the folder again") from error
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} is damaged or incomplete ({error}); fetch it again") from error


def _weight_map(index: Path) -> dict[str, str]:
    try:
        named = json.loads(index.read_bytes())["weight_map"]
        if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
            raise ValueError("weight_map is no object of file names")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{index} is damaged: {error}; fetch the folder again") from error
    return named


def open_weights(folder: Path, spec: ModelSpec, *, quantized: bool = False) -> WeightFiles:
    """Open a folder whose tensors have the names and shapes that the configuration implies.

    Only ``quantized`` ones may hold float8 numbers and their scales.

    Raises:
        ModelError: names the file and the tensor that is missing, left over, damaged or of another shape.
    """
    files = WeightFiles(folder)
    if not quantized:
        _refuse_quantized(files, spec)
    expected = {tensor.name: tensor.shape for tensor in hf_tensor_specs(spec, torch.float32)}
    if missing := [name for name in expected if name not in files.names]:
        raise ModelError(f"{folder}: {len(missing)} tensors are missing, among them {missing[0]!r}")
    left_over = sorted(
        name
        for name in files.names - expected.keys()
        if not (name.endswith(_IGNORED_SUFFIX) or name.startswith(spec.unused_tensors))
        and not (spec.tie and name == HEAD)
    )
    if others := [name for name in left_over if not (quantized and name.endswith(SCALE_SUFFIX))]:
        raise ModelError(
            f"{files.file(others[0])}: nothing uses tensor {others[0]!r} ({len(others)} such tensors); "
            "the folder's config.json describes another model"
        )
    for name, shape in expected.items():
        if (found := files.spec(name).shape) != shape:
            raise ModelError(f"{files.file(name)}: tensor {name!r} has shape {found}, config.json implies {shape}")
    if spec.tie and HEAD in files.names and not torch.equal(files.tensor(HEAD), files.tensor(EMBEDDING)):
        raise ModelError(
            f"{files.file(HEAD)}: tensor {HEAD!r} differs from {EMBEDDING!r}, though config.json says "
            "tie_word_embeddings: true; write false to keep this head, or remove it from the file"
        )
    return files


def _refuse_quantized(files: WeightFiles, spec: ModelSpec) -> None:
    remedy = "give the folder that was quantised, of float32, bfloat16 or float16"
    if spec.quantized:
        raise ModelError(f"{files.folder / 'config.json'}: quantization_config says quantised weights; {remedy}")
    for name in files.names:
        if (dtype := files.spec(name).dtype) not in _DTYPES:
            raise ModelError(
                f"{files.file(name)}: tensor {name!r} is {str(dtype).removeprefix('torch.')}, numbers without their "
                f"scales; {remedy}"
            )
        if name.endswith((SCALE_SUFFIX, f"{SCALE_SUFFIX}_inv")):
            raise ModelError(f"{files.file(name)}: tensor {name!r} is the scale of a quantised one; {remedy}")


def write_weights(
    folder: Path, specs: Sequence[TensorSpec], tensors: Iterator[tuple[str, torch.Tensor | None]], shard_bytes: int
) -> None:
    """Write the tensors that ``specs`` announce, in its order and dtypes, with an index where there are several files.

    One file's tensors are in memory at a time. A tensor larger than ``shard_bytes`` has a file of its own.

    Raises:
        OSError, SafetensorError: a file cannot be written; :func:`~megatron_fr.hf.atomic.atomic_folder` explains them.
    """
    shards: list[list[TensorSpec]] = [[]]
    room = shard_bytes
    for spec in specs:
        if shards[-1] and spec.num_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(spec)
        room -= spec.num_bytes
    weight_map: dict[str, str] = {}
    for number, members in enumerate(shards, start=1):
        file = SINGLE_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        held: dict[str, torch.Tensor] = {}
        for spec in members:
            name, tensor = next(tensors)
            assert tensor is not None
            assert (name, tuple(tensor.shape)) == (spec.name, spec.shape), name
            # A copy: a view of a layer's experts would keep all of them in memory.
            held[name] = tensor.to("cpu", spec.dtype, copy=True).contiguous()
        save_file(held, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(spec.num_bytes for spec in specs)}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
