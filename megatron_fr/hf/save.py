"""A Megatron-Core model as a complete Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_fr.errors import ModelError
from megatron_fr.hf.atomic import atomic_folder
from megatron_fr.hf.export import hf_tensor_specs, iter_hf_tensors
from megatron_fr.hf.folder import copy_other_files, resolve_folder, stated_dtype
from megatron_fr.hf.weights import write_weights
from megatron_fr.models.spec import ModelSpec

#: Largest weight file, and so the most that a writer holds of what it has not written.
SHARD_BYTES = 2 * 10**9


def save_hf_folder(
    chunks: Sequence[torch.nn.Module],
    spec: ModelSpec,
    source_dir: str | Path,
    out_dir: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write ``out_dir``: safetensors files of at most ``shard_bytes``, and the other files of ``source_dir``.

    A collective; rank 0 writes, one file's tensors in host memory at a time. Weights get the dtype that
    ``source_dir``'s configuration states. The folder appears whole or not at all; one that was there is replaced.

    Raises:
        ModelError: on every rank, when rank 0 could not write.
    """
    tensors = iter_hf_tensors(chunks, spec)
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            source = resolve_folder(source_dir, weights=False)
            dtype = stated_dtype(source) or next(chunks[0].parameters()).dtype
            with atomic_folder(out_dir, overwrite=True) as work:
                write_weights(work, hf_tensor_specs(spec, dtype), _present(tensors), shard_bytes)
                copy_other_files(source, work)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure[0] = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
    for _ in tensors:  # all of them on other ranks; on rank 0 what a failure left over, so that no sender waits
        pass
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise ModelError(f"the model could not be written to {out_dir}: {failure[0]}")


def _present(tensors: Iterator[tuple[str, torch.Tensor | None]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        assert tensor is not None
        yield name, tensor
