"""What a checkpoint holds of a model and its optimizer, independent of the layout.

Every entry is one tensor of a whole parameter's shape, of which a rank holds boxes (:class:`Pieces`):

- ``<parameter>``: the weight, in the model's dtype;
- ``optimizer.state.exp_avg.<parameter>``, ``optimizer.state.exp_avg_sq.<parameter>``: Adam's moments, float32;
- ``optimizer.state.fp32_param.<parameter>``: the float32 master copy of a bfloat16 model.

Parameter names are those of Megatron's sharded state dictionaries with one name a layer
(``decoder.layers.3.self_attention.linear_qkv.weight``). Gate and up are halves of the rows of ``linear_fc1``; experts
lie along a first dimension of their own. Transformer Engine's ``_extra_state`` objects are left out, so that layers
with and without it load each other's checkpoints.

A rank of the distributed optimizer owns a range of each flat parameter, which Megatron-Core 0.19 refuses to save. Here
a range is saved as the boxes that make it up: whole rows, and parts of the first and the last row. Nothing is gathered.

The optimizers' own ``sharded_state_dict`` leaves out the ``step`` of torch's AdamW, and its parameter groups do not
match at another EP size. Here the configuration and the schedule define the groups, and the step is one number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron_fr.errors import CheckpointError
from megatron_fr.models.spec import ModelSpec

_MOMENTS = ("exp_avg", "exp_avg_sq")
#: Rows that only pad the vocabulary to a multiple of TP differ between layouts.
_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")

Shape = tuple[int, ...]


class Trained(Protocol):
    """What a checkpoint saves of one rank; the trainer's ``Policy`` is one."""

    spec: ModelSpec
    source: Path  #: the Hugging Face folder that the model came from
    chunks: Sequence[torch.nn.Module]
    step: Any  #: has ``optimizer`` (``MegatronOptimizer``) and ``schedule`` (``OptimizerParamScheduler``)


class Pieces:
    """This rank's boxes of one tensor of ``shape``, in the form that ``torch.distributed.checkpoint`` asks for.

    ``boxes`` holds tensors by the offset of their first element: views of live memory, or copies of it.
    """

    def __init__(self, shape: Shape, *, padded: bool) -> None:
        self.shape = torch.Size(shape)
        self.boxes: dict[torch.Size, torch.Tensor] = {}
        if not padded:  # torch compares a size that it finds with the saved one
            self.size = lambda: self.shape

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        items = []
        for chunk, box in zip(self.__create_chunk_list__(), self.boxes.values(), strict=True):
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(box), self.shape)
            items.append(WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, box.size()) for offset, box in self.boxes.items()]


def local_pieces(
    chunks: Sequence[torch.nn.Module], optimizer: Any | None = None, *, to_save: bool
) -> dict[str, Pieces]:
    """This rank's share of the weights, and of an optimizer's state, by name in the checkpoint.

    Args:
        optimizer: of Megatron-Core; parameters that it never updated get the state that their first update starts from.
        to_save: leave out what another rank saves; otherwise all that this rank needs is there.
    """
    found: dict[str, Pieces] = {}
    by_param: dict[int, Any] = {}
    for entry in _weights(chunks):
        by_param[id(entry.data)] = entry
        if not to_save or not any(entry.replica_id):
            _add(found, "", entry, entry.data.detach(), 0)
    for part in _parts(optimizer) if optimizer is not None else []:
        _fill_missing(part)
        # Data-parallel ranks, the last number of a replica's id, share the distributed optimizer's state out.
        replica = slice(None, -1) if isinstance(part, DistributedOptimizer) else slice(None)
        for param, main, start in _mains(part):
            entry = by_param[id(param)]
            if not to_save or not any(entry.replica_id[replica]):
                tensors = {name: part.optimizer.state[main][name] for name in _MOMENTS}
                if part.config.bf16 and main is not param:
                    tensors["fp32_param"] = main
                for name, tensor in tensors.items():
                    _add(found, f"optimizer.state.{name}.", entry, tensor.detach(), start)
    return found


def adam_step(optimizer: Any) -> int:
    """How many steps Adam has taken; one number, since every step updates every parameter."""
    steps: set[int] = set()
    for part in _parts(optimizer):
        steps |= {int(group["step"]) for group in part.optimizer.param_groups if "step" in group and group["params"]}
        steps |= {int(state["step"]) for state in part.optimizer.state.values() if "step" in state}
    if len(steps) > 1:
        raise CheckpointError(f"parameters have taken different numbers of Adam steps ({sorted(steps)})")
    return steps.pop() if steps else 0


def set_adam_step(optimizer: Any, step: int) -> None:
    """Undo :func:`adam_step`."""
    for part in _parts(optimizer):
        if not isinstance(part.optimizer, torch.optim.Adam):  # the fused ones count per group
            for group in part.optimizer.param_groups:
                group["step"] = step
        for state in part.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(step)


def split_range(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Offset and shape of each box that elements ``start`` to ``stop`` of a row-major tensor fill, in their order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), (stop - start,) * len(shape)
        return
    row = math.prod(shape[1:])
    whole_rows = (-(-start // row) * row, stop // row * row)
    for begin, end in pairwise(sorted({start, stop, *(cut for cut in whole_rows if start < cut < stop)})):
        index, within = divmod(begin, row)
        if within == end % row == 0:
            yield (index, *[0] * (len(shape) - 1)), ((end - begin) // row, *shape[1:])
        else:
            for offset, size in split_range(shape[1:], within, within + end - begin):
                yield (index, *offset), (1, *size)


def _weights(chunks: Sequence[Any]) -> Iterator[Any]:
    """Megatron's entries of the weights, whose data are the live parameters."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group, "non_homogeneous_layers": True}
    for chunk in chunks:
        for entry in nested_values(chunk.sharded_state_dict(prefix="", metadata=metadata)):
            if isinstance(entry, ShardedTensor | ShardedTensorFactory):
                if entry.key in _PADDED:
                    entry.allow_shape_mismatch = True
                yield entry


def _add(found: dict[str, Pieces], prefix: str, entry: Any, tensor: torch.Tensor, start: int) -> None:
    """Add the boxes of ``tensor``, which is the flat parameter of ``entry`` from element ``start`` on."""
    flat = tensor.view(-1)
    for shard in nested_values([entry.build()]) if isinstance(entry, ShardedTensorFactory) else [entry]:
        begin = shard.data.storage_offset() - entry.data.storage_offset()
        assert shard.data.is_contiguous(), shard.key
        assert shard.data.untyped_storage().data_ptr() == entry.data.untyped_storage().data_ptr(), shard.key
        lead = shard.prepend_axis_num
        empty = Pieces(shard.global_shape, padded=shard.allow_shape_mismatch)
        boxes = found.setdefault(prefix + shard.key, empty).boxes
        at = max(start - begin, 0)
        for offset, size in split_range(shard.local_shape, at, min(start + flat.numel() - begin, shard.data.numel())):
            place = torch.Size(a + b for a, b in zip(shard.global_offset, (*[0] * lead, *offset), strict=True))
            assert place not in boxes, (shard.key, place)
            first = begin + at - start
            boxes[place] = flat[first : first + math.prod(size)].view(*[1] * lead, *size)
            at += math.prod(size)


def _parts(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]


def _fill_missing(part: Any) -> None:
    """Give parameters that were never updated the state that their first update would start from."""
    for param in (param for group in part.optimizer.param_groups for param in group["params"]):
        state = part.optimizer.state[param]
        if "exp_avg" not in state:
            if isinstance(part.optimizer, torch.optim.Adam):
                state["step"] = torch.zeros((), dtype=torch.float32)
            state |= {name: torch.zeros_like(param) for name in _MOMENTS}


def _mains(part: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]:
    """``(parameter, what the optimizer updates for it on this rank, its first element in the flat parameter)``."""
    if isinstance(part, DistributedOptimizer):
        for param, (group, order) in part.model_param_group_index_map.items():
            main = part.optimizer.param_groups[group]["params"][order]
            yield param, main, part._get_model_param_range_map(param)["param"].start
        return
    masters: dict[torch.Tensor, torch.Tensor] = {}
    if hasattr(part, "float16_groups"):
        for params, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            masters |= zip(mains, params, strict=True)
    for main in (main for group in part.optimizer.param_groups for main in group["params"]):
        yield masters.get(main, main), main, 0
