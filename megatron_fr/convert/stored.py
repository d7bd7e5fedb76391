"""Whole parameters out of a Megatron torch_dist checkpoint, whatever layout wrote it; no process group.

A checkpoint has tensors of the whole model's size under keys, stored in the pieces that the ranks held. A layer's
parameter has either a key of its own (``decoder.layers.3.self_attention.linear_qkv.weight``) or a row in a tensor of
all layers (``decoder.layers.self_attention.linear_qkv.weight``, Megatron's naming of uniform layers). Experts are rows
of one tensor (``...mlp.experts.experts.linear_fc1.weight``).
"""

import re
from collections.abc import Iterator
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_fr.checkpoint.reader import CheckedReader
from megatron_fr.errors import ModelError
from megatron_fr.hf.export import shard_shape
from megatron_fr.models.local import FUSED_NORMS
from megatron_fr.models.spec import MappedParameter, ModelSpec

_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
_LAYER = re.compile(r"^decoder\.layers\.\d+\.")
_EXPERT = re.compile(r"\.experts\.local_experts\.\d+\.")


def find_checkpoint(path: str | Path) -> Path:
    """The torch_dist folder at ``path``, or the only one below it, or a ModelError; hidden folders are unfinished."""
    path = Path(path)
    if (path / ".metadata").is_file():
        return path
    below = sorted(file.parent for file in path.rglob(".metadata"))
    found = [folder for folder in below if not any(p.startswith(".") for p in folder.relative_to(path).parts)]
    if not found:
        raise ModelError(f"{path} holds no Megatron checkpoint: no .metadata in it; was it saved to the end?")
    if len(found) > 1:
        raise ModelError(f"{path} holds {len(found)} checkpoints; choose one, such as {found[-1]}")
    return found[0]


class StoredTensors:
    """A checkpoint's ``tensors``: key to whole shape, dtype and pieces. Nothing is read until it is asked for.

    Raises:
        ModelError: its ``.metadata`` is damaged, or a file that it names is missing or shorter than it says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._reader = folder, CheckedReader(folder)
        try:
            metadata = self._reader.read_metadata()
            self._files: dict[MetadataIndex, Any] = metadata.storage_data
            found = metadata.state_dict_metadata.items()
            self.tensors = {key: entry for key, entry in found if isinstance(entry, TensorStorageMetadata)}
        except Exception as error:  # unpickling damaged bytes raises whatever it meets
            raise ModelError(f"{folder / '.metadata'} is damaged: {error}; use another checkpoint") from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        for index, info in self._files.items():
            path, end = folder / info.relative_path, info.offset + info.length
            if not path.is_file():
                raise ModelError(f"{path} is missing; it holds {index.fqn!r} among others; use another checkpoint")
            if path.stat().st_size < end:
                raise ModelError(f"{path} is cut off: tensor {index.fqn!r} should end at byte {end}")

    def read(self, key: str, lead: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """The part of a tensor at index ``lead`` of its first axes, without the rows that pad a vocabulary.

        Raises:
            ModelError: it has not this ``shape``, or pieces are missing or damaged; names the file and the tensor.
        """
        entry = self.tensors[key]
        stored = tuple(entry.size)[len(lead) :]
        if stored != shape and not (key in _PADDED and stored[0] > shape[0] and stored[1:] == shape[1:]):
            raise ModelError(f"{self.folder}: tensor {key!r} has shape {stored}, config.json implies {shape}")
        planner = _OneTensor()
        planner.block = torch.empty((*[1] * len(lead), *shape), dtype=entry.properties.dtype)
        wanted = ChunkStorageMetadata(offsets=torch.Size((*lead, *[0] * len(shape))), sizes=planner.block.shape)
        items = create_read_items_for_chunk_list(key, entry, [wanted])
        if sum(prod(item.lengths) for item in items) != planner.block.numel():
            raise ModelError(f"{self.folder}: pieces of tensor {key!r} are missing; use another checkpoint")
        for item in items:
            try:
                self._reader.read_data(LoadPlan([item]), planner).wait()
            except Exception as error:  # on damaged bytes zip, pickle and torch raise a dozen kinds
                file = self.folder / self._files[item.storage_index].relative_path
                reason = " ".join(str(error).split())[:200]
                raise ModelError(f"{file}: tensor {key!r} cannot be read: {reason}; use another checkpoint") from error
        return planner.block.reshape(shape)


class _OneTensor(DefaultLoadPlanner):
    block: torch.Tensor

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.block


def read_parameters(stored: StoredTensors, model: ModelSpec) -> Iterator[tuple[MappedParameter, torch.Tensor]]:
    """Every parameter of the model as TP size 1 has it, its vocabulary not padded, in their order.

    One layer's experts are in memory at a time; an expert's parameter is a view of them. A ModelError names what is
    missing or damaged.
    """
    for _, layer in groupby(model.parameters(), key=lambda entry: entry.layer):
        experts: dict[str, torch.Tensor] = {}
        for entry in layer:
            key, lead = _locate(stored, entry)
            shape = shard_shape(entry.mapping, model, 1)
            if entry.expert is None:
                yield entry, stored.read(key, lead, shape)
                continue
            if key not in experts:
                experts[key] = stored.read(key, lead, (model.experts, *shape))
            yield entry, experts[key][entry.expert]


def _locate(stored: StoredTensors, entry: MappedParameter) -> tuple[str, tuple[int, ...]]:
    """Key of a parameter, and its layer's index where all layers share the key; a ModelError if there is none."""
    plain = _EXPERT.sub(".experts.experts.", entry.param)
    for key in (plain, *(plain.replace(norm, fused) for fused, norm in FUSED_NORMS.items())):
        if key in stored.tensors:
            return key, ()
        if entry.layer is not None and (shared := _LAYER.sub("decoder.layers.", key)) in stored.tensors:
            return shared, (entry.layer,)
    raise ModelError(f"{stored.folder}: the checkpoint has no tensor for {entry.param!r}; is it of another model?")


def check_complete(stored: StoredTensors, model: ModelSpec) -> None:
    """Accept a checkpoint of every parameter of the model and no weight besides; a ModelError names another one."""
    used = {_locate(stored, entry)[0] for entry in model.parameters()}
    if model.tie:
        used.add("output_layer.weight")  # the last pipeline stage's copy of the embedding
    weights = {key for key in stored.tensors if key.startswith(("decoder.", "embedding.", "output_layer."))}
    if left_over := sorted(weights - used):
        raise ModelError(
            f"{stored.folder}: nothing uses tensor {left_over[0]!r} ({len(left_over)} such tensors); "
            "the checkpoint is of another model than config.json describes"
        )
