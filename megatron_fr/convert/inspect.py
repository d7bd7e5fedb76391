"""What a model folder holds, as text: Hugging Face folders and Megatron torch_dist checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from megatron_fr.checkpoint.store import MANIFEST_FILE
from megatron_fr.errors import ModelError
from megatron_fr.hf.checkpoint_files import CheckpointFiles, check_sums, find_checkpoint
from megatron_fr.hf.folder import INDEX_NAME, SINGLE_NAME, WeightFiles, read_hf_config
from megatron_fr.hf.load import check_files
from megatron_fr.hf.quantized import check_quantized
from megatron_fr.hf.tensor_file import TensorSpec
from megatron_fr.models.dims import Dims


def inspect_folder(folder: str | Path, *, tensors: bool = False, sums: bool = True) -> str:
    """Describe a folder: its kind, sizes, dtypes and files, and every tensor when asked.

    Args:
        sums: of a training checkpoint, compare every file in full with its ``manifest.json``.

    Raises:
        ModelError: it is neither kind, damaged, or its tensors are not those that its configuration implies.
    """
    folder = Path(folder)
    if (folder / INDEX_NAME).is_file() or (folder / SINGLE_NAME).is_file():
        return "\n".join(_hugging_face(folder, tensors))
    if folder.is_dir() and any(folder.rglob(".metadata")):
        return "\n".join(_megatron(find_checkpoint(folder), tensors, sums))
    raise ModelError(f"{folder} is neither a Hugging Face folder with safetensors nor a Megatron torch_dist checkpoint")


def _hugging_face(folder: Path, tensors: bool) -> list[str]:
    hf_config = read_hf_config(folder)
    files, dims = WeightFiles(folder), Dims.from_hf(hf_config)
    quantized = hasattr(hf_config, "quantization_config")
    check_files(files, hf_config, quantized=quantized)
    specs = [files.spec(name) for name in sorted(files.names)]
    lines = [f"{folder}: Hugging Face folder, {hf_config.architectures[0]}, complete", *_sizes(dims), *_totals(specs)]
    if quantized:
        lines.append(f"  quantised: {check_quantized(folder)} float8 tensors, each with its scale")
    count = Counter(files.file(spec.name).name for spec in specs)
    lines += [f"  {name}: {number} tensors" for name, number in sorted(count.items())]
    files.close()
    return lines + (_list(specs) if tensors else [])


def _megatron(folder: Path, tensors: bool, sums: bool) -> list[str]:
    files = CheckpointFiles(folder)
    summed = sums and check_sums(folder)
    specs = [TensorSpec(key, tuple(entry.size), entry.properties.dtype) for key, entry in sorted(files.tensors.items())]
    optimizer = [spec for spec in specs if spec.name.startswith("optimizer.")]
    weights = [spec for spec in specs if not spec.name.startswith("optimizer.")]
    pieces = sum(len(entry.chunks) for entry in files.tensors.values())
    lines = [f"{folder}: Megatron torch_dist checkpoint, {pieces} pieces", *_totals(weights)]
    if summed:
        lines.append(f"  every file has the SHA-256 sum that {MANIFEST_FILE} says")
    elif (folder / MANIFEST_FILE).is_file():
        lines.append("  sizes compared, SHA-256 sums not")
    else:
        lines.append(f"  sizes compared; without a {MANIFEST_FILE} there are no sums to compare")
    if optimizer:
        lines.append(f"  with optimizer state: {sum(spec.num_bytes for spec in optimizer) / 1e9:.3f} GB")
    lines += [f"  {path.name}: {path.stat().st_size / 1e9:.3f} GB" for path in sorted(folder.glob("*.distcp"))]
    return lines + (_list(specs) if tensors else [])


def _sizes(dims: Dims) -> list[str]:
    text = f"  {dims.layers} layers, hidden {dims.hidden}, {dims.heads} heads, {dims.kv_heads} KV heads of "
    text += f"{dims.head_dim}, vocabulary {dims.vocab}"
    if dims.moe_layers:
        text += f"; {len(dims.moe_layers)} layers with {dims.experts} experts of width {dims.moe_ffn}, top {dims.top_k}"
    return [text]


def _totals(specs: Iterable[TensorSpec]) -> list[str]:
    by_dtype: Counter[str] = Counter()
    total = elements = number = 0
    for spec in specs:
        by_dtype[str(spec.dtype).removeprefix("torch.")] += 1
        total += spec.num_bytes
        elements += spec.num_bytes // spec.dtype.itemsize
        number += 1
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(by_dtype.items()))
    return [f"  {number} tensors ({kinds}), {elements:,} elements, {total / 1e9:.3f} GB"]


def _list(specs: Iterable[TensorSpec]) -> list[str]:
    return [f"  {spec.name} {list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}" for spec in specs]
