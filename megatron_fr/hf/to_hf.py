"""A Megatron torch_dist checkpoint of any layout as a Hugging Face folder, without building the model."""

from __future__ import annotations

import functools
from contextlib import closing
from pathlib import Path

import torch

from megatron_fr.checkpoint.keys import Location, candidates
from megatron_fr.errors import ModelError
from megatron_fr.hf.atomic import atomic_folder
from megatron_fr.hf.checkpoint_files import CheckpointFiles, check_sums, find_checkpoint
from megatron_fr.hf.export import hf_tensor_specs
from megatron_fr.hf.folder import WeightFiles, copy_other_files, read_spec, resolve_folder, stated_dtype
from megatron_fr.hf.load import check_files
from megatron_fr.hf.row_runs import gather_runs, whole_shape
from megatron_fr.hf.save import plan_files, write_index
from megatron_fr.hf.side_by_side import THREADS, Progress, even_parts, run_side_by_side
from megatron_fr.hf.tensor_file import TensorFileWriter, TensorSpec
from megatron_fr.hf.to_megatron import HF_FILES
from megatron_fr.models.sizes import Sizes
from megatron_fr.models.spec import MappedParameter, ModelSpec


def convert_megatron_to_hf(
    checkpoint_dir: str | Path,
    out_dir: str | Path,
    *,
    hf_dir: str | Path | None = None,
    threads: int = THREADS,
    verify: bool = False,
    overwrite: bool = False,
    shard_bytes: int = 5 * 10**9,
    progress: Progress | None = None,
) -> Path:
    """Write the weights of a checkpoint, and the other files of the model it came from, as ``out_dir``.

    A training checkpoint's optimizer state is left out. Bytes are copied from file to file; a parameter that must be
    cast, or was stored in columns, is in memory, one at a time in each thread.

    Args:
        hf_dir: folder or hub name with configuration and tokenizer; None: the ``hf`` folder in or above the checkpoint.
        threads: that many write files side by side, never more than there are files (several at one file were measured
            to be no faster); with ``verify`` that many compare parameters.
        verify: first compare the checkpoint's files with the sums in its ``manifest.json``, where it has one; at the
            end read ``out_dir`` again, shard it, and compare every bit with the checkpoint, before it gets its name
            (:func:`compare`, also for the memory that takes).
        overwrite: replace a model or checkpoint in ``out_dir`` with all that it holds.
        shard_bytes: largest file.
        progress: called with the name and the bytes of each tensor written, by one thread at a time.

    Raises:
        ModelError: names the file and the tensor; ``out_dir`` is as it was.
    """
    checkpoint = find_checkpoint(checkpoint_dir)
    source = _hf_files(checkpoint, hf_dir)
    model = read_spec(source)
    files = CheckpointFiles(checkpoint)
    _locate_all(files, model)
    dtype = stated_dtype(source) or files.tensors["embedding.word_embeddings.weight"].properties.dtype
    plan = plan_files(hf_tensor_specs(model, dtype), shard_bytes)
    with atomic_folder(out_dir, checkpoint, source, overwrite=overwrite) as work:
        if verify:
            check_sums(checkpoint)
        jobs = [functools.partial(_write_file, files, model, work / name, plan[name]) for name in plan]
        run_side_by_side(jobs, threads, progress)
        write_index(work, plan)
        copy_other_files(source, work)
        if verify:
            compare(checkpoint, work, threads=threads)
    return Path(out_dir)


def _write_file(
    checkpoint: CheckpointFiles, model: ModelSpec, path: Path, members: list[TensorSpec], progress: Progress
) -> None:
    """Write one safetensors file; ``members`` are consecutive tensors of the model.

    Raises:
        ModelError: names the file and the tensor.
    """
    wanted = {spec.name: spec for spec in members}
    dims = model
    # Closed each time: of a checkpoint of many ranks not all files may be open at once.
    with closing(checkpoint.reopened()) as files, TensorFileWriter(path, members) as writer:
        for entry in model.parameters():
            if not wanted.keys().isdisjoint(entry.hf):
                _write_entry(writer, files, entry, dims, wanted, progress)


def _write_entry(
    writer: TensorFileWriter,
    files: CheckpointFiles,
    entry: MappedParameter,
    dims: Sizes,
    wanted: dict[str, TensorSpec],
    progress: Progress,
) -> None:
    """Write those of an entry's tensors that are wanted: copy their bytes where they lie in whole rows."""
    place = _locate(files, entry)
    shape = whole_shape(entry.mapping, dims)
    runs = dict(zip(entry.hf, gather_runs(entry.mapping, dims), strict=True))
    names = [name for name in entry.hf if name in wanted]
    same = all(wanted[name].dtype == files.tensors[place.key].properties.dtype for name in names)
    rows = files.rows(place.key, place.lead, shape) if same else None
    if rows is None:
        whole = files.read(place.key, place.lead, shape)
        values = dict(zip(entry.hf, entry.mapping.gather([whole], dims), strict=True))
    for name in names:
        if rows is None:
            writer.write(name, values[name].to(wanted[name].dtype))
        else:
            writer.copy(name, (extent for run in runs[name] for extent in rows.extents(run.start, run.stop)))
        progress(name, wanted[name].num_bytes)


def read_whole(files: CheckpointFiles, entry: MappedParameter, dims: Sizes) -> torch.Tensor:
    """The parameter that an entry stands for, as TP size 1 has it, its vocabulary not padded."""
    place = _locate(files, entry)
    return files.read(place.key, place.lead, whole_shape(entry.mapping, dims))


def compare(checkpoint: str | Path, hf_folder: str | Path, *, threads: int = THREADS) -> int:
    """Shard a Hugging Face folder and compare it, bit for bit, with a checkpoint cast to the folder's dtype.

    Args:
        threads: that many compare side by side, and each takes three to five times the bytes of its largest parameter.

    Returns:
        how many parameters were compared: all.

    Raises:
        ModelError: a tensor is missing, has another shape, or differs; names one, the first that was found.
    """
    model = read_spec(hf_folder)
    dims, files = model, CheckpointFiles(find_checkpoint(checkpoint))
    with closing(files), closing(WeightFiles(Path(hf_folder))) as written:
        check_files(written, model)
        table = [(entry, sum(written.spec(name).num_bytes for name in entry.hf)) for entry in model.parameters()]
        parts = even_parts([size for _, size in table], 4 * threads)  # more than threads: some take longer
        jobs = [functools.partial(_compare, files, written, table[part.start : part.stop], dims) for part in parts]
        return sum(run_side_by_side(jobs, threads))


def _compare(
    checkpoint: CheckpointFiles,
    written: WeightFiles,
    table: list[tuple[MappedParameter, int]],
    dims: Sizes,
    progress: Progress,
) -> int:
    with closing(checkpoint.reopened()) as files:
        for entry, size in table:
            _compare_one(files, written, entry, dims)
            progress(entry.hf[0], size)
    return len(table)


def _compare_one(files: CheckpointFiles, written: WeightFiles, entry: MappedParameter, dims: Sizes) -> None:
    found = entry.mapping.shard([written.slice(name) for name in entry.hf], dims, 0, 1)  # it takes twice its size
    stored = read_whole(files, entry, dims)
    if not _same_bits(stored, found):
        gathered = zip(entry.hf, entry.mapping.gather([stored], dims), strict=True)
        name = next((n for n, value in gathered if not _same_bits(value, written.slice(n)[:])), entry.hf[0])
        raise ModelError(f"{written.file(name)}: tensor {name!r} is not what the checkpoint holds")


def _same_bits(stored: torch.Tensor, found: torch.Tensor) -> bool:
    stored, found = stored.to(found.dtype).contiguous(), found.contiguous()
    return stored.shape == found.shape and torch.equal(stored.view(torch.uint8), found.view(torch.uint8))


def _locate_all(files: CheckpointFiles, model: ModelSpec) -> None:
    """Check before anything is written that every parameter is there, and that no weight is left over."""
    used = {_locate(files, entry).key for entry in model.parameters()}
    weights = {key for key in files.tensors if key.startswith(("decoder.", "embedding.", "output_layer."))}
    tied_copy = {"output_layer.weight"} if model.tie else set()
    if left_over := sorted(weights - used - tied_copy):
        raise ModelError(
            f"{files.folder}: nothing uses tensor {left_over[0]!r} ({len(left_over)} such tensors); "
            "the checkpoint is of another model than config.json describes"
        )


def _locate(files: CheckpointFiles, entry: MappedParameter) -> Location:
    for place in candidates(entry):
        if place.key in files.tensors:
            return place
    raise ModelError(f"{files.folder}: the checkpoint has no tensor for {entry.param!r}; is it of another model?")


def _hf_files(checkpoint: Path, hf_dir: str | Path | None) -> Path:
    if hf_dir is not None:
        return resolve_folder(hf_dir, weights=False)
    for folder in (checkpoint / HF_FILES, checkpoint, checkpoint.parent / HF_FILES, checkpoint.parent):
        if (folder / "config.json").is_file():
            return folder
    raise ModelError(f"{checkpoint} has no {HF_FILES}/config.json; give the model's Hugging Face folder (--hf-dir)")
