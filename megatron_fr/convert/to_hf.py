"""A Megatron torch_dist checkpoint of any layout as a Hugging Face folder, without building the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_fr.checkpoint.store import HF_FILES
from megatron_fr.convert.stored import StoredTensors, check_complete, find_checkpoint, read_parameters
from megatron_fr.errors import ModelError
from megatron_fr.hf.atomic import atomic_folder
from megatron_fr.hf.export import hf_tensor_specs
from megatron_fr.hf.folder import copy_other_files, read_spec, resolve_folder, stated_dtype
from megatron_fr.hf.save import SHARD_BYTES
from megatron_fr.hf.weights import open_weights, write_weights
from megatron_fr.models.spec import ModelSpec


def convert_megatron_to_hf(
    checkpoint_dir: str | Path,
    out_dir: str | Path,
    *,
    hf_dir: str | Path | None = None,
    verify: bool = False,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the weights of a checkpoint, and the other files of the model it came from, as ``out_dir``.

    A training checkpoint's optimizer state is left out. One layer's experts and one file's tensors are in memory.

    Args:
        hf_dir: folder or hub name with configuration and tokenizer; None: the ``hf`` folder in or above the checkpoint.
        verify: before ``out_dir`` gets its name, read it again and compare every bit with the checkpoint.
        overwrite: replace a model or checkpoint in ``out_dir`` with all that it holds.
        shard_bytes: largest file.

    Raises:
        ModelError: names the file and the tensor; ``out_dir`` is as it was.
    """
    checkpoint = find_checkpoint(checkpoint_dir)
    source = _hf_files(checkpoint, hf_dir)
    model = read_spec(source)
    stored = StoredTensors(checkpoint)
    check_complete(stored, model)
    dtype = stated_dtype(source) or stored.tensors["embedding.word_embeddings.weight"].properties.dtype
    with atomic_folder(out_dir, checkpoint, source, overwrite=overwrite) as work:
        write_weights(work, hf_tensor_specs(model, dtype), _hf_tensors(stored, model), shard_bytes)
        copy_other_files(source, work)
        if verify:
            compare(checkpoint, work, model)
    return Path(out_dir)


def _hf_tensors(stored: StoredTensors, model: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    for entry, value in read_parameters(stored, model):
        yield from zip(entry.hf, entry.mapping.gather([value], model), strict=True)


def compare(checkpoint: Path, hf_folder: Path, model: ModelSpec, *, written: str = "hf") -> int:
    """Shard a Hugging Face folder and compare every bit of it with a checkpoint.

    Args:
        written: ``hf`` or ``checkpoint``, the side whose dtype the other one is cast to.

    Returns:
        number of parameters compared: all of the model's.

    Raises:
        ModelError: a tensor is missing, has another shape, or differs; names it.
    """
    count = 0
    with open_weights(hf_folder, model) as files:
        for entry, stored in read_parameters(StoredTensors(checkpoint), model):
            found = entry.mapping.shard([files.tensor(name) for name in entry.hf], model, 0, 1)
            to = found.dtype if written == "hf" else stored.dtype
            if not _same_bits(stored, found, to):
                whole = zip(entry.hf, entry.mapping.gather([stored], model), strict=True)
                name = next((n for n, value in whole if not _same_bits(value, files.tensor(n), to)), entry.hf[0])
                raise ModelError(f"{files.file(name)}: tensor {name!r} is not what {checkpoint} holds")
            count += 1
    return count


def _same_bits(first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(*(tensor.to(dtype).contiguous().view(torch.uint8) for tensor in (first, second)))


def _hf_files(checkpoint: Path, hf_dir: str | Path | None) -> Path:
    if hf_dir is not None:
        return resolve_folder(hf_dir, weights=False)
    for folder in (checkpoint / HF_FILES, checkpoint, checkpoint.parent / HF_FILES, checkpoint.parent):
        if (folder / "config.json").is_file():
            return folder
    raise ModelError(f"{checkpoint} has no {HF_FILES}/config.json; give the model's Hugging Face folder (--hf-dir)")
