"""What a model folder holds, as text: Hugging Face folders and Megatron torch_dist checkpoints."""

from collections import Counter
from pathlib import Path

import torch

from megatron_fr.convert.stored import StoredTensors, find_checkpoint
from megatron_fr.errors import ModelError
from megatron_fr.hf.export import TensorSpec
from megatron_fr.hf.folder import read_spec
from megatron_fr.hf.weights import INDEX_NAME, SCALE_SUFFIX, SINGLE_NAME, WeightFiles, open_weights


def inspect_folder(folder: str | Path, *, tensors: bool = False) -> str:
    """Describe a folder: its kind, sizes, dtypes and files, and every tensor when asked.

    Raises:
        ModelError: it is neither kind, damaged, or its tensors are not those that its configuration implies.
    """
    folder = Path(folder)
    if (folder / INDEX_NAME).is_file() or (folder / SINGLE_NAME).is_file():
        lines, specs = _hugging_face(folder)
    elif folder.is_dir() and any(folder.rglob(".metadata")):
        lines, specs = _megatron(find_checkpoint(folder))
    else:
        raise ModelError(f"{folder} is neither a Hugging Face folder with safetensors nor a Megatron checkpoint")
    if tensors:
        lines += [f"  {spec.name} {list(spec.shape)} {_dtype(spec)}" for spec in specs]
    return "\n".join(lines)


def _hugging_face(folder: Path) -> tuple[list[str], list[TensorSpec]]:
    model = read_spec(folder)
    files = open_weights(folder, model, quantized=model.quantized)
    specs = [files.spec(name) for name in sorted(files.names)]
    count = Counter(files.file(spec.name).name for spec in specs)
    experts = (
        f"; {len(model.moe_layers)} layers with {model.experts} experts of width {model.moe_ffn}, top {model.top_k}"
    )
    lines = [
        f"{folder}: Hugging Face folder, {model.architecture}, complete",
        f"  {model.layers} layers, hidden {model.hidden}, {model.heads} heads, {model.kv_heads} KV heads of "
        f"{model.head_dim}, vocabulary {model.vocab}{experts if model.moe else ''}",
        _total(specs),
    ]
    if model.quantized:
        lines.append(f"  quantised: {check_quantized(folder)} float8 tensors, each with its scale")
    return lines + [f"  {name}: {number} tensors" for name, number in sorted(count.items())], specs


def _megatron(folder: Path) -> tuple[list[str], list[TensorSpec]]:
    tensors = sorted(StoredTensors(folder).tensors.items())
    specs = [TensorSpec(key, tuple(entry.size), entry.properties.dtype) for key, entry in tensors]
    optimizer = [spec for spec in specs if spec.name.startswith("optimizer.")]
    pieces = sum(len(entry.chunks) for _, entry in tensors)
    lines = [
        f"{folder}: Megatron torch_dist checkpoint, {pieces} pieces, every file as long as it should be",
        _total([spec for spec in specs if not spec.name.startswith("optimizer.")]),
    ]
    if optimizer:
        lines.append(f"  with optimizer state: {sum(spec.num_bytes for spec in optimizer) / 1e9:.3f} GB")
    lines += [f"  {path.name}: {path.stat().st_size / 1e9:.3f} GB" for path in sorted(folder.glob("*.distcp"))]
    return lines, specs


def _total(specs: list[TensorSpec]) -> str:
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(Counter(map(_dtype, specs)).items()))
    elements = sum(spec.num_bytes // spec.dtype.itemsize for spec in specs)
    return f"  {len(specs)} tensors ({kinds}), {elements:,} elements, {sum(s.num_bytes for s in specs) / 1e9:.3f} GB"


def _dtype(spec: TensorSpec) -> str:
    return str(spec.dtype).removeprefix("torch.")


def check_quantized(folder: Path) -> int:
    """Count the float8 tensors of a folder, each of which has its scale.

    Raises:
        ModelError: a scale is missing, router, head or embedding is quantised, or nothing is; names the tensor.
    """
    files = WeightFiles(folder)
    eight = [name for name in sorted(files.names) if files.tensor(name).dtype == torch.float8_e4m3fn]
    for name in eight:
        if f"{name}{SCALE_SUFFIX}" not in files.names:
            raise ModelError(f"{files.file(name)}: tensor {name!r} is float8 and has no scale")
        if name.endswith(("mlp.gate.weight", "lm_head.weight", "embed_tokens.weight")):
            raise ModelError(f"{files.file(name)}: tensor {name!r} must not be quantised")
    if not eight:
        raise ModelError(f"{folder}: nothing was quantised; has the model layers that ModelOpt knows?")
    return len(eight)
