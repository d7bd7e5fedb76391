"""Megatron torch_dist checkpoints as Hugging Face folders, and such folders as checkpoints of weights alone."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_fr.checkpoint.store import HF_FILES
from megatron_fr.config import RunConfig
from megatron_fr.config.sections import ModelConfig, ParallelConfig, TrainConfig
from megatron_fr.convert.stored import StoredTensors, check_complete, find_checkpoint, read_parameters
from megatron_fr.errors import ConfigError, MegatronFRError, ModelError
from megatron_fr.hf.atomic import atomic_folder
from megatron_fr.hf.export import hf_tensor_specs
from megatron_fr.hf.folder import check_links, copy_other_files, read_spec, resolve_folder, stated_dtype
from megatron_fr.hf.weights import SHARD_BYTES, open_weights, write_weights
from megatron_fr.models.layouts import check_layout
from megatron_fr.models.spec import ModelSpec
from megatron_fr.runtime.device import prepare_process, resolve_device


def report(convert: Callable[[], Path], *, verified: bool) -> int:
    """Call a conversion and print where its result is, or its error; return the exit status of its tool."""
    started = time.monotonic()
    try:
        out = convert()
    except (MegatronFRError, KeyboardInterrupt) as error:
        stopped = isinstance(error, KeyboardInterrupt)
        print("interrupted" if stopped else f"error: {error}", file=sys.stderr)
        return 130 if stopped else 1
    if os.environ.get("RANK", "0") == "0":
        gb = sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) / 1e9
        print(f"{out}: {gb:.3f} GB in {time.monotonic() - started:.1f} s{', verified' if verified else ''}")
    return 0


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

    No model is built. A training checkpoint's optimizer state is left out. One layer's experts and one file's tensors,
    at most ``shard_bytes``, are in memory.

    Args:
        hf_dir: folder or hub name with configuration and tokenizer; None: the ``hf`` folder in or above the checkpoint.
        verify: before ``out_dir`` gets its name, read it again and compare every bit with the checkpoint.
        overwrite: replace a model or checkpoint in ``out_dir`` with all that it holds.

    Raises:
        ModelError: names the file and the tensor; ``out_dir`` is as it was.
    """
    checkpoint = find_checkpoint(checkpoint_dir)
    source = _hf_files(checkpoint) if hf_dir is None else resolve_folder(hf_dir, weights=False)
    model = read_spec(source)
    stored = StoredTensors(checkpoint)
    check_complete(stored, model)
    dtype = stated_dtype(source) or stored.tensors["embedding.word_embeddings.weight"].properties.dtype
    tensors = (
        tensor
        for entry, value in read_parameters(stored, model)
        for tensor in zip(entry.hf, entry.mapping.gather([value], model), strict=True)
    )
    with atomic_folder(out_dir, checkpoint, source, overwrite=overwrite) as work:
        write_weights(work, hf_tensor_specs(model, dtype), tensors, shard_bytes)
        copy_other_files(source, work)
        if verify:
            compare(checkpoint, work, model)
    return Path(out_dir)


def _hf_files(checkpoint: Path) -> Path:
    for folder in (checkpoint / HF_FILES, checkpoint, checkpoint.parent / HF_FILES, checkpoint.parent):
        if (folder / "config.json").is_file():
            return folder
    raise ModelError(f"{checkpoint} has no {HF_FILES}/config.json; give the model's Hugging Face folder (--hf-dir)")


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
    process stays in the world of ranks that it joined. ``verify`` and ``overwrite`` are as for the other direction.

    Args:
        tp, ep, pp: sizes of the layout; experts are not split over TP.
        dtype: ``float32`` or ``bfloat16``, of the stored weights; None: that of the folder.

    Raises:
        ModelError: the folder is damaged or cannot be mapped, or ``out_dir`` cannot be written and is as it was.
        ConfigError: sizes, dtype or memory do not suit the model, or the sizes not the ranks.
    """
    from megatron_fr.trainer import distributed

    source = resolve_folder(hf_dir)
    check_links(source)
    model = read_spec(source)
    info = distributed.bootstrap()
    ranks = info.world_size
    if ranks > 1 and (ranks % (tp * pp) or ranks % (ep * pp)):
        raise ConfigError(f"{ranks} ranks are no multiple of --tp={tp} x --pp={pp} and --ep={ep} x --pp={pp}")
    parallel = ParallelConfig(world_size=tp * ep * pp if ranks == 1 else ranks, tp=tp, ep=ep, pp=pp)
    try:
        check_layout(model, parallel)
    except ConfigError as error:
        raise ConfigError(str(error).replace("parallel.", "--")) from error
    held = open_weights(source, model).tensor("model.embed_tokens.weight").dtype
    dtype = dtype or str(stated_dtype(source) or held).removeprefix("torch.")
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"the weights are {dtype}, which the trainer does not have; give --dtype bfloat16 or float32")
    needed = sum(spec.num_bytes for spec in hf_tensor_specs(model, getattr(torch, dtype)))
    if ranks == 1 and needed > (free := psutil.virtual_memory().available):
        raise ConfigError(
            f"the weights take {needed / 1e9:.1f} GB in {dtype}, and one process has {free / 1e9:.1f} GB "
            "here; split them over ranks on several machines: start this tool with torchrun and give --tp, --ep or --pp"
        )
    known: dict[str, Any] = {  # reward and data stay out: no run follows
        "model": ModelConfig(path=str(source), dtype=dtype),
        "parallel": ParallelConfig() if ranks == 1 else parallel,
        "train": TrainConfig(num_updates=1, batch_size=1),
    }
    config = RunConfig.model_construct(**known)
    device = resolve_device("cpu")
    prepare_process(device)
    distributed.initialize(config.parallel, device, seed=0, info=info)
    from megatron.core import parallel_state

    from megatron_fr.checkpoint.io import save_weights
    from megatron_fr.hf.model import load_hf_weights
    from megatron_fr.runtime.collectives import from_rank_zero
    from megatron_fr.trainer.model import build_model

    def finish() -> None:
        (work / HF_FILES).mkdir()
        copy_other_files(source, work / HF_FILES)
        if verify:
            compare(work, source, model, written="checkpoint")

    with ExitStack() as stack:
        stack.callback(parallel_state.destroy_model_parallel)
        work = from_rank_zero(lambda: stack.enter_context(atomic_folder(out_dir, source, overwrite=overwrite)))
        chunks = build_model(model, config, device, routing_replay=False)
        load_hf_weights(chunks, model, source)
        save_weights(chunks, work)
        from_rank_zero(finish)
    return Path(out_dir)


def compare(checkpoint: Path, hf_folder: Path, model: ModelSpec, *, written: str = "hf") -> int:
    """Shard a Hugging Face folder, compare every bit of it with a checkpoint, and count parameters: all of the model's.

    Args:
        written: ``hf`` or ``checkpoint``, the side whose dtype the other one is cast to.

    Raises:
        ModelError: a tensor is missing, has another shape, or differs; names it.
    """
    files, count = open_weights(hf_folder, model), 0
    for entry, stored in read_parameters(StoredTensors(checkpoint), model):
        sources = [files.tensor(name) for name in entry.hf]
        found = entry.mapping.shard(sources, model, 0, 1)
        to = found.dtype if written == "hf" else stored.dtype
        if not _same_bits(stored, found, to):
            pairs = zip(entry.mapping.gather([stored], model), sources, strict=True)
            name = entry.hf[[_same_bits(*pair, to) for pair in pairs].index(False)]
            raise ModelError(f"{files.file(name)}: tensor {name!r} is not what {checkpoint} holds")
        count += 1
    return count


def _same_bits(first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(*(tensor.to(dtype).contiguous().view(torch.uint8) for tensor in (first, second)))
