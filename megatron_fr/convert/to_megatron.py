"""A Hugging Face folder as a Megatron torch_dist checkpoint of weights alone, in one process or several."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_fr.checkpoint.store import HF_FILES
from megatron_fr.config import RunConfig
from megatron_fr.config.sections import ModelConfig, ParallelConfig, TrainConfig
from megatron_fr.convert.to_hf import compare
from megatron_fr.errors import ConfigError
from megatron_fr.hf.atomic import atomic_folder
from megatron_fr.hf.export import hf_tensor_specs
from megatron_fr.hf.folder import copy_other_files, read_spec, resolve_folder, stated_dtype
from megatron_fr.hf.weights import open_weights
from megatron_fr.models.layouts import check_layout
from megatron_fr.models.spec import ModelSpec
from megatron_fr.runtime.device import prepare_process, resolve_device


def convert_hf_to_megatron(
    hf_dir: str | Path,
    out_dir: str | Path,
    *,
    tp: int = 1,
    ep: int = 1,
    pp: int = 1,
    dtype: str | None = None,
    verify: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write ``out_dir``: Megatron's torch_dist files, and ``hf/`` with configuration and tokenizer.

    The model is built and loaded as the trainer does it, on CPUs, and any layout can load the result. A process on its
    own holds the whole model, and only checks that the sizes fit it; ranks that a launcher started split it. The
    process stays in the world of ranks that it joined.

    Args:
        tp, ep, pp: sizes of the layout; experts are not split over TP.
        dtype: ``float32`` or ``bfloat16``, of the stored weights; None: that of the folder.
        verify: before ``out_dir`` gets its name, read it again and compare every bit with the folder.
        overwrite: replace a model or checkpoint in ``out_dir`` with all that it holds.

    Raises:
        ModelError: the folder is damaged or cannot be mapped, or ``out_dir`` cannot be written; ``out_dir`` is as
            it was.
        ConfigError: the sizes do not fit the model or the ranks, the model does not fit into one process, or the
            trainer does not have the folder's dtype.
    """
    from megatron_fr.trainer import distributed

    source = resolve_folder(hf_dir)
    model = read_spec(source)
    info = distributed.bootstrap()
    alone = info.world_size == 1
    if not alone and (info.world_size % (tp * pp) or info.world_size % (ep * pp)):
        raise ConfigError(f"{info.world_size} ranks are no multiple of --tp={tp} x --pp={pp} and --ep={ep} x --pp={pp}")
    asked = ParallelConfig(world_size=tp * ep * pp if alone else info.world_size, tp=tp, ep=ep, pp=pp)
    try:
        check_layout(model, asked)
    except ConfigError as error:
        raise ConfigError(str(error).replace("parallel.", "--")) from error
    parallel = ParallelConfig() if alone else asked
    with open_weights(source, model) as files:
        found = stated_dtype(source) or files.tensor("model.embed_tokens.weight").dtype
    known: dict[str, Any] = {  # reward and data stay out: no run follows
        "model": ModelConfig(path=str(source), dtype=_trained_dtype(dtype or str(found).removeprefix("torch."))),
        "parallel": parallel,
        "train": TrainConfig(num_updates=1, batch_size=1),
    }
    config = RunConfig.model_construct(**known)
    if alone:
        _check_memory(model, config)
    device = resolve_device("cpu")
    prepare_process(device)
    distributed.initialize(parallel, device, seed=0, info=info)
    try:
        return _convert(config, model, source, Path(out_dir), verify=verify, overwrite=overwrite)
    finally:
        sys.modules["megatron.core.parallel_state"].destroy_model_parallel()


def _convert(config: RunConfig, model: ModelSpec, source: Path, out: Path, *, verify: bool, overwrite: bool) -> Path:
    from megatron_fr.checkpoint.io import save_weights
    from megatron_fr.hf.load import load_hf_weights
    from megatron_fr.runtime.collectives import from_rank_zero
    from megatron_fr.trainer.model import build_model

    with ExitStack() as stack:
        work = from_rank_zero(lambda: stack.enter_context(atomic_folder(out, source, overwrite=overwrite)))
        chunks = build_model(model, config, resolve_device("cpu"), routing_replay=False)
        load_hf_weights(chunks, model, source)
        save_weights(chunks, work)

        def finish() -> None:
            (work / HF_FILES).mkdir()
            copy_other_files(source, work / HF_FILES)
            if verify:
                compare(work, source, model, written="checkpoint")

        from_rank_zero(finish)
    return out


def _trained_dtype(name: str) -> str:
    if name not in ("float32", "bfloat16"):
        raise ConfigError(f"the weights are {name}, which the trainer does not have; give --dtype bfloat16 or float32")
    return name


def _check_memory(model: ModelSpec, config: RunConfig) -> None:
    """One process holds the model, and while it is saved the file's buffers."""
    needed = sum(spec.num_bytes for spec in hf_tensor_specs(model, getattr(torch, config.model.dtype)))
    free = psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"the weights take {needed / 1e9:.1f} GB in {config.model.dtype}, and one process has {free / 1e9:.1f} GB "
            "here; split them over ranks on several machines: start this tool with torchrun and give --tp, --ep or --pp"
        )
