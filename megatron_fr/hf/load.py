"""Hugging Face weights into a Megatron-Core model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_fr.errors import ModelError
from megatron_fr.hf.folder import resolve_folder
from megatron_fr.hf.weights import open_weights
from megatron_fr.models import local
from megatron_fr.models.spec import ModelSpec

log = logging.getLogger(__name__)


@torch.no_grad()
def load_hf_weights(chunks: Sequence[torch.nn.Module], spec: ModelSpec, path: str | Path) -> None:
    """Fill this rank's parameters, reading only the slices it holds, one parameter at a time. No collective.

    Tensors are cast to the parameters' dtype; a warning counts those that the model does without. The folder's names
    and shapes are checked in full on every rank, before anything is read, so that all ranks fail alike.

    Raises:
        ModelError: names the file and the tensor that is missing, left over, damaged or of another shape.
    """
    with open_weights(resolve_folder(path), spec) as files:
        unused = sorted(name for name in files.names if name.startswith(spec.unused_tensors))
        if unused and dist.get_rank() == 0:
            log.warning(
                "%s: %d tensors are not trained, and saved models lack them: %s ...", path, len(unused), unused[0]
            )
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
            value = entry.mapping.shard([files.tensor(hf) for hf in entry.hf], spec, rank, size)
            if value.shape != parameter.shape:
                raise ModelError(
                    f"parameter {name!r} has shape {tuple(parameter.shape)}, its mapping gives {tuple(value.shape)}"
                )
            parameter.copy_(value)
