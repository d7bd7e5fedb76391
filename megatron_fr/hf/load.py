"""Hugging Face weights into a Megatron-Core model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_fr.errors import ModelError
from megatron_fr.hf.folder import WeightFiles, resolve_folder
from megatron_fr.hf.quantized import SCALE_SUFFIX
from megatron_fr.models import local
from megatron_fr.models.spec import ModelSpec

log = logging.getLogger(__name__)

#: Stored by some exporters, and computed here.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


@torch.no_grad()
def load_hf_weights(chunks: Sequence[torch.nn.Module], spec: ModelSpec, path: str | Path) -> None:
    """Fill this rank's parameters, reading only the slices it holds, one parameter at a time. No collective.

    Tensors are cast to the parameters' dtype; a warning counts those that the model does without. The folder's names
    and shapes are checked in full on every rank, before anything is read, so that all ranks fail alike.

    Raises:
        ModelError: names the file and the tensor that is missing, left over, damaged or of another shape.
    """
    files = WeightFiles(resolve_folder(path))
    check_files(files, spec)
    unused = sorted(name for name in files.names if name.startswith(spec.unused_tensors))
    if unused and dist.get_rank() == 0:
        log.warning("%s: %d tensors are not trained, and saved models lack them: %s ...", path, len(unused), unused[0])

    by_param = {entry.param: entry for entry in spec.parameters()}
    if spec.tie:  # the last of several pipeline stages has its own copy of the embedding
        by_param["output_layer.weight"] = by_param["embedding.word_embeddings.weight"]
    here = local.placement(chunks)
    for name, parameter in local.parameters(chunks).items():
        entry = by_param.get(name)
        if entry is None:
            raise ModelError(f"the model has a parameter {name!r} that no mapping of its family fills")
        rank, size = here.tp_rank, here.tp_size
        if entry.mapping.per_expert:
            rank, size = here.expert_tp_rank, here.expert_tp_size
        value = entry.mapping.shard([files.slice(hf) for hf in entry.hf], spec, rank, size)
        if value.shape != parameter.shape:
            raise ModelError(
                f"parameter {name!r} has shape {tuple(parameter.shape)}, its mapping gives {tuple(value.shape)}"
            )
        parameter.copy_(value)
    files.close()


def check_files(files: WeightFiles, spec: ModelSpec, *, quantized: bool = False) -> None:
    """Compare the names and shapes of a folder's tensors with those that the configuration implies.

    Args:
        quantized: scales may be there too.

    Raises:
        ModelError: names the file and the tensor that is missing, left over or of another shape.
    """
    expected = {
        name: shape
        for entry in spec.parameters()
        for name, shape in zip(entry.hf, entry.mapping.hf_shapes(spec), strict=True)
    }
    held = files.names
    if missing := [name for name in expected if name not in held]:
        raise ModelError(f"{files.folder}: {len(missing)} tensors are missing, among them {missing[0]!r}")
    allowed = {"lm_head.weight"} if spec.tie else set()
    ignored = (*_IGNORED_SUFFIXES, SCALE_SUFFIX) if quantized else _IGNORED_SUFFIXES
    left_over = sorted(
        name
        for name in held - expected.keys() - allowed
        if not name.endswith(ignored) and not name.startswith(spec.unused_tensors)
    )
    if left_over and left_over[0].endswith(SCALE_SUFFIX):
        raise ModelError(
            f"{files.file(left_over[0])}: tensor {left_over[0]!r} is the scale of a quantised one; give the folder "
            "that was quantised"
        )
    if left_over:
        raise ModelError(
            f"{files.file(left_over[0])}: nothing uses tensor {left_over[0]!r} ({len(left_over)} such tensors); "
            "the folder's config.json describes another model"
        )
    for name, shape in expected.items():
        if files.shape(name) != shape:
            raise ModelError(
                f"{files.file(name)}: tensor {name!r} has shape {files.shape(name)}, config.json implies {shape}"
            )
