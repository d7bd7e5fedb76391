"""A Megatron-Core model from and to a Hugging Face folder."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import Module

from megatron_fr.errors import ModelError
from megatron_fr.hf.atomic import atomic_folder
from megatron_fr.hf.export import hf_tensor_specs, iter_hf_tensors
from megatron_fr.hf.folder import copy_other_files, resolve_folder, stated_dtype
from megatron_fr.hf.weights import SHARD_BYTES, open_weights, write_weights
from megatron_fr.models import local
from megatron_fr.models.spec import ModelSpec

log = logging.getLogger(__name__)


@torch.no_grad()
def load_hf_weights(chunks: Sequence[Module], spec: ModelSpec, path: str | Path) -> None:
    """Fill this rank's parameters, reading only the slices it holds, one parameter at a time. No collective.

    Tensors are cast to the parameters' dtype; a warning counts those that the model does without. The folder's names
    and shapes are checked in full on every rank, before anything is read, so that all ranks fail alike.

    Raises:
        ModelError: names the file and the tensor that is missing, left over, damaged or of another shape.
    """
    files = open_weights(resolve_folder(path), spec)
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
        value = entry.mapping.shard([files.tensor(hf) for hf in entry.hf], spec, *here.shard(entry))
        if value.shape != parameter.shape:
            raise ModelError(
                f"parameter {name!r} has shape {tuple(parameter.shape)}, its mapping gives {tuple(value.shape)}"
            )
        parameter.copy_(value)


def save_hf_folder(
    chunks: Sequence[Module], spec: ModelSpec, source: str | Path, out: str | Path, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write ``out``: safetensors files of at most ``shard_bytes``, and the other files of ``source``.

    A collective; rank 0 writes, one file's tensors in host memory at a time. Weights get the dtype that
    ``source``'s configuration states. The folder appears whole or not at all; one that was there is replaced.

    Raises:
        ModelError: on every rank, when rank 0 could not write.
    """
    tensors = iter_hf_tensors(chunks, spec)
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            folder = resolve_folder(source, weights=False)
            dtype = stated_dtype(folder) or next(chunks[0].parameters()).dtype
            with atomic_folder(out, overwrite=True) as work:
                write_weights(work, hf_tensor_specs(spec, dtype), tensors, shard_bytes)
                copy_other_files(folder, work)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure[0] = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
    for _ in tensors:  # all of them on other ranks; on rank 0 what a failure left over, so that no sender waits
        pass
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise ModelError(f"the model could not be written to {out}: {failure[0]}")
