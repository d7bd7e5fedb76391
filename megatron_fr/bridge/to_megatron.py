"""A Hugging Face folder as a Megatron torch_dist checkpoint, without building the model: tensor by tensor."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_fr.bridge.atomic import atomic_folder
from megatron_fr.bridge.checkpoint_keys import Location, written_at
from megatron_fr.bridge.dims import Dims
from megatron_fr.bridge.folder import WeightFiles, copy_other_files, read_hf_config, resolve_folder
from megatron_fr.bridge.load import check_files
from megatron_fr.bridge.registry import Entry, entries, is_tied
from megatron_fr.errors import ConfigError, ModelError

#: Folder inside a checkpoint with configuration, tokenizer and chat template.
HF_FILES = "hf"
_COMMON = "common_state/shard_0_1"
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class _Piece:
    entry: Entry
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
    progress: Progress | None = None,
) -> Path:
    """Write ``out_dir``: Megatron's torch_dist files, and ``hf/`` with configuration and tokenizer.

    Any layout can load the checkpoint; the sizes decide the pieces and files in which it is stored, so that ranks of
    that layout read nothing that they do not need. One tensor is in memory at a time.

    Args:
        tensor, expert, pipeline: sizes of the layout to store for; experts are not split over TP.
        dtype: of the stored weights; None: that of the folder.
        progress: called with the name and the bytes of each tensor written.

    Raises:
        ModelError: the folder is damaged or cannot be mapped, or ``out_dir`` cannot be written; ``out_dir`` is as
            it was.
        ConfigError: the sizes do not divide the model's.
    """
    source = resolve_folder(hf_dir)
    hf_config = read_hf_config(source)
    dims, table = Dims.from_hf(hf_config), list(entries(hf_config))
    _check_split(dims, tensor, expert, pipeline)
    files = WeightFiles(source)
    check_files(files, table, dims, tied=is_tied(hf_config))

    pieces: dict[MetadataIndex, _Piece] = {}
    plans: dict[tuple[int, int, int], list[WriteItem]] = {}
    for entry in table:
        size = 1 if entry.rule.replicated or entry.rule.per_expert else tensor
        for rank in range(size):
            for part in range(entry.rule.parts):
                place = written_at(entry, moe=entry.layer in dims.moe_layers)
                item = _write_item(_Piece(entry, place, rank, size, part), dims, dtype or files.spec(entry.hf[0]).dtype)
                pieces[item.index] = _Piece(entry, place, rank, size, part)
                holder = _holder(entry, dims, rank, expert, pipeline)
                plans.setdefault(holder, []).append(item)
    common = MetadataIndex(_COMMON)
    plans[min(plans)].append(WriteItem(index=common, type=WriteItemType.BYTE_IO))

    planner = _StreamingPlanner(files, pieces, dims, dtype, progress)
    with atomic_folder(out_dir) as work:
        _write(work, [plans[key] for key in sorted(plans)], planner)
        (work / HF_FILES).mkdir()
        copy_other_files(source, work / HF_FILES)
    files.close()
    return Path(out_dir)


def _write(work: Path, plans: list[list[WriteItem]], planner: _StreamingPlanner) -> None:
    writer = FileSystemWriter(work, sync_files=False)
    writer.set_up_storage_writer(True)
    crc = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # twice the time, and loading does not look at it
    try:
        ranked, metadata = create_default_global_save_plan([SavePlan(items) for items in plans])
        results = []
        for plan in writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in ranked]):
            future: Any = writer.write_data(plan, planner)
            results.append(future.wait())
        writer.finish(metadata, results)
        (work / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError of its zip writer
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{work.name}: tensor {planner.current!r} cannot be written: {reason}") from error
    finally:
        torch.serialization.set_crc32_options(crc)


def _write_item(piece: _Piece, dims: Dims, dtype: torch.dtype) -> WriteItem:
    rule, lead = piece.entry.rule, piece.where.lead
    meta = [torch.empty(shape, device="meta") for shape in rule.hf_shapes(dims)]
    shape = tuple(rule.piece(meta, dims, piece.rank, piece.size, piece.part).shape)
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


def _holder(entry: Entry, dims: Dims, rank: int, expert: int, pipeline: int) -> tuple[int, int, int]:
    """``(pipeline stage, expert rank, tensor rank)`` that a piece is written for."""
    if entry.layer is None:
        stage = 0 if entry.param.startswith("embedding.") else pipeline - 1
    else:
        stage = entry.layer * pipeline // dims.layers
    return stage, 0 if entry.expert is None else entry.expert * expert // dims.experts, rank


def _check_split(dims: Dims, tensor: int, expert: int, pipeline: int) -> None:
    dense = len(dims.moe_layers) < dims.layers
    for option, size, what, whole in (
        ("--tp", tensor, "KV heads", dims.kv_heads),
        ("--tp", tensor, "MLP width", dims.ffn if dense else tensor),
        ("--ep", expert, "experts", dims.experts or 1),
        ("--pp", pipeline, "layers", dims.layers),
    ):
        if size < 1 or whole % size:
            raise ConfigError(f"{option} {size} does not divide the model's {what} ({whole}); choose a divisor")


class _StreamingPlanner(DefaultSavePlanner):
    """Hands torch's writer each piece when it is about to write it."""

    def __init__(
        self,
        files: WeightFiles,
        pieces: dict[MetadataIndex, _Piece],
        dims: Dims,
        dtype: torch.dtype | None,
        progress: Progress | None,
    ) -> None:
        super().__init__()
        self._files, self._dims, self._dtype, self._progress = files, dims, dtype, progress
        self._pieces = {(index.fqn, index.offset): piece for index, piece in pieces.items()}
        self.current = ""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            payload = io.BytesIO()
            torch.save([{"content_metadata": {"format": "megatron-fr weights"}}], payload)
            payload.seek(0)
            return payload
        piece = self._pieces[write_item.index.fqn, write_item.index.offset]
        self.current = ", ".join(piece.entry.hf)
        sources = [self._files.slice(name) for name in piece.entry.hf]
        value = piece.entry.rule.piece(sources, self._dims, piece.rank, piece.size, piece.part)
        assert write_item.tensor_data is not None
        value = value.to(self._dtype or value.dtype).reshape(write_item.tensor_data.chunk.sizes)
        if self._progress is not None:
            self._progress(piece.entry.param, value.numel() * value.element_size())
        return value
