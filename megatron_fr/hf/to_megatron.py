"""A Hugging Face folder as a Megatron torch_dist checkpoint, without building the model: tensor by tensor."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron_fr.checkpoint.keys import Location, written_at
from megatron_fr.errors import ConfigError
from megatron_fr.hf.archive import frame
from megatron_fr.hf.atomic import atomic_folder
from megatron_fr.hf.extents import copy_extents, write_all, writing
from megatron_fr.hf.folder import WeightFiles, copy_other_files, read_spec, resolve_folder
from megatron_fr.hf.load import check_files
from megatron_fr.hf.row_runs import piece_runs, piece_shape
from megatron_fr.hf.side_by_side import THREADS, Progress, even_parts, run_side_by_side
from megatron_fr.models.sizes import Sizes
from megatron_fr.models.spec import MappedParameter

#: Folder inside a checkpoint with configuration, tokenizer and chat template.
HF_FILES = "hf"
_COMMON = "common_state/shard_0_1"


@dataclass(frozen=True)
class _Piece:
    entry: MappedParameter
    where: Location
    rank: int
    size: int
    part: int


def convert_hf_to_megatron(
    hf_dir: str | Path,
    out_dir: str | Path,
    *,
    tensor: int = 1,
    expert: int = 1,
    pipeline: int = 1,
    dtype: torch.dtype | None = None,
    threads: int = THREADS,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write ``out_dir``: Megatron's torch_dist files, and ``hf/`` with configuration and tokenizer.

    Any layout can load the checkpoint; the sizes decide the pieces and files in which it is stored, so that ranks of
    that layout read nothing that they do not need. Bytes are copied from file to file; a tensor that must be cast, cut
    along its columns or padded is in memory, one at a time in each thread.

    Args:
        tensor, expert, pipeline: sizes of the layout to store for; experts are not split over TP.
        dtype: of the stored weights; None: that of the folder.
        threads: that many write files side by side; where they are more than the layout's ranks, each rank's pieces
            lie in several files.
        overwrite: replace a model or checkpoint in ``out_dir`` with all that it holds.
        progress: called with the name and the bytes of each tensor written, by one thread at a time.

    Raises:
        ModelError: the folder is damaged or cannot be mapped, or ``out_dir`` cannot be written; ``out_dir`` is as
            it was.
        ConfigError: the sizes do not divide the model's; KV heads are not repeated for a larger TP.
    """
    source = resolve_folder(hf_dir)
    model = read_spec(source)
    dims, table = model, list(model.parameters())
    _check_split(dims, tensor, expert, pipeline)
    files = WeightFiles(source)
    check_files(files, model)

    pieces: dict[tuple[str, torch.Size | None], _Piece] = {}
    plans: dict[tuple[int, int, int], list[WriteItem]] = {}
    for entry in table:
        size = 1 if entry.mapping.replicated or entry.mapping.per_expert else tensor
        place = written_at(entry, moe=entry.layer in dims.moe_layers)
        for rank in range(size):
            for part in range(entry.mapping.parts):
                piece = _Piece(entry, place, rank, size, part)
                item = _write_item(piece, dims, dtype or files.spec(entry.hf[0]).dtype)
                pieces[item.index.fqn, item.index.offset] = piece
                holder = _holder(entry, dims, rank, expert, pipeline)
                plans.setdefault(holder, []).append(item)
    common = MetadataIndex(_COMMON)
    plans[min(plans)].insert(0, WriteItem(index=common, type=WriteItemType.BYTE_IO))

    with atomic_folder(out_dir, source, overwrite=overwrite) as work:
        writer = FileSystemWriter(work, sync_files=False)
        writer.set_up_storage_writer(True)
        ranked, metadata = create_default_global_save_plan([SavePlan(plans[key]) for key in sorted(plans)])
        jobs = [
            functools.partial(
                _write_file,
                work / f"__{rank}_{i}.distcp",
                plan.items[part.start : part.stop],
                files,
                pieces,
                dims,
            )
            for rank, plan in enumerate(ranked)
            for i, part in enumerate(even_parts([_num_bytes(item) for item in plan.items], -(-threads // len(ranked))))
        ]
        results = run_side_by_side(jobs, threads, progress)
        _write_metadata(work, writer, metadata, results)
        (work / HF_FILES).mkdir()
        copy_other_files(source, work / HF_FILES)
    files.close()
    return Path(out_dir)


def _write_metadata(work: Path, writer: FileSystemWriter, metadata: Metadata, results: list[list[WriteResult]]) -> None:
    with writing(work, "the checkpoint's metadata"):
        writer.finish(metadata, results)
        (work / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))


def _num_bytes(item: WriteItem) -> int:
    """Size of a piece without its frame."""
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _write_file(
    path: Path,
    items: Sequence[WriteItem],
    files: WeightFiles,
    pieces: Mapping[tuple[str, torch.Size | None], _Piece],
    dims: Sizes,
    progress: Progress,
) -> list[WriteResult]:
    """Write pieces of one rank, one after the other, and say where they are."""
    source, results = _Source(files, pieces, dims), []
    with writing(path, "the file"):
        file = path.open("wb", buffering=0)
    with file:
        for item in items:
            start = file.tell()
            with writing(path, f"tensor {source.names(item)!r}"):
                source.write(item, file)
            length = file.tell() - start
            results.append(WriteResult(item.index, length, _StorageInfo(path.name, start, length)))
            if item.tensor_data is not None:
                progress(item.index.fqn, length)
        with writing(path, "the file"):
            file.close()
    return results


def _write_item(piece: _Piece, dims: Sizes, dtype: torch.dtype) -> WriteItem:
    rule, lead = piece.entry.mapping, piece.where.lead
    shape = piece_shape(rule, dims, piece.rank, piece.size, piece.part)
    whole, offset = list(shape), [0] * len(shape)
    if rule.axis is not None:
        whole[rule.axis] = shape[rule.axis] * piece.size * rule.parts
        offset[rule.axis] = rule.piece_offset(shape[rule.axis], piece.rank, piece.size, piece.part)
    sizes = [dims.experts] if lead else []
    offsets = torch.Size((*lead, *offset))
    return WriteItem(
        index=MetadataIndex(piece.where.key, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size([1] * len(lead) + list(shape))),
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(sizes + whole),
        ),
    )


def _holder(entry: MappedParameter, dims: Sizes, rank: int, expert: int, pipeline: int) -> tuple[int, int, int]:
    """``(pipeline stage, expert rank, tensor rank)`` that a piece is written for."""
    if entry.layer is None:
        stage = 0 if entry.param.startswith("embedding.") else pipeline - 1
    else:
        stage = entry.layer * pipeline // dims.layers
    return stage, 0 if entry.expert is None else entry.expert * expert // dims.experts, rank


def _check_split(dims: Sizes, tensor: int, expert: int, pipeline: int) -> None:
    dense = len(dims.moe_layers) < dims.layers
    for option, size, what, whole in (
        ("--tp", tensor, "KV heads", dims.kv_heads),
        ("--tp", tensor, "MLP width", dims.ffn if dense else tensor),
        ("--ep", expert, "experts", dims.experts or 1),
        ("--pp", pipeline, "layers", dims.layers),
    ):
        if size < 1 or whole % size:
            raise ConfigError(f"{option} {size} does not divide the model's {what} ({whole}); choose a divisor")


class _Source:
    """Writes the bytes of each item of a checkpoint."""

    def __init__(self, files: WeightFiles, pieces: Mapping[tuple[str, torch.Size | None], _Piece], dims: Sizes) -> None:
        self._files, self._pieces, self._dims = files, pieces, dims

    def names(self, item: WriteItem) -> str:
        """The Hugging Face tensors that an item is made of."""
        return ", ".join(self._pieces[item.index.fqn, item.index.offset].entry.hf) if item.tensor_data else _COMMON

    def write(self, item: WriteItem, file: io.FileIO) -> None:
        """Append the bytes of an item.

        Raises:
            ModelError: a tensor cannot be read.
            OSError: the file cannot be written.
        """
        if item.tensor_data is None:
            payload = io.BytesIO()
            torch.save([{"content_metadata": {"format": "megatron-fr weights"}}], payload)
            write_all(file, payload.getvalue())
            return
        piece, dtype = self._pieces[item.index.fqn, item.index.offset], item.tensor_data.properties.dtype
        before, after = frame(tuple(item.tensor_data.chunk.sizes), dtype)
        write_all(file, before)
        rule, names = piece.entry.mapping, piece.entry.hf
        runs = piece_runs(rule, self._dims, piece.rank, piece.size, piece.part)
        if runs is not None and all(self._files.spec(name).dtype == dtype for name in names):
            copy_extents((self._files.slice(names[run.source]).extent(run.start, run.stop) for run in runs), file)
        else:
            sources = [self._files.slice(name) for name in names]
            value = rule.piece(sources, self._dims, piece.rank, piece.size, piece.part).to(dtype).contiguous()
            write_all(file, memoryview(value.reshape(-1).view(torch.uint8).numpy()))
        write_all(file, after)
