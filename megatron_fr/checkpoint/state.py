"""What a training checkpoint holds of the model and its optimizer, independent of the layout.

Every entry is a Megatron ``ShardedTensor`` of a whole parameter's shape, so that any layout can load it:

- ``<parameter>``: the weight, in the model's dtype;
- ``optimizer.state.exp_avg.<parameter>``, ``optimizer.state.exp_avg_sq.<parameter>``: Adam's moments, float32;
- ``optimizer.state.fp32_param.<parameter>``: the float32 master copy of a bfloat16 model.

Parameter names are those of Megatron's own sharded state dictionaries with one name a layer
(``decoder.layers.3.self_attention.linear_qkv.weight``), gate and up apart, experts along a dimension of their own.

Why not the optimizers' ``sharded_state_dict``. With torch's AdamW (no Transformer Engine, as on a CPU) Megatron-Core
0.19's distributed optimizer cannot make or load one: its ``init_state_fn`` leaves out AdamW's per-parameter ``step``,
which ``state_dict`` then reads (``KeyError: 'step'``), and ``_set_main_param_and_optimizer_states`` wants to copy a
``step`` that its own ``fully_reshardable`` format leaves out. Beyond that, parameter groups are saved per chained
optimizer, and their number depends on the layout (experts get an optimizer of their own only where EP > 1), so that
they do not match at another EP size (``Could not find parameter group``). Nothing of the groups is state here: the
configuration and the schedule define them, and AdamW's step is one number for all parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_fr.errors import CheckpointError

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTER = "param"  # as Megatron calls the float32 copy in memory
_SAVED_AS = {_MASTER: "fp32_param"}
#: Rows that only pad the vocabulary to a multiple of TP differ between layouts.
_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")

Sharded = dict[str, Any]


def model_state(chunks: Sequence[torch.nn.Module]) -> Sharded:
    """The weights; their data are the live parameters."""
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "non_homogeneous_layers": True,
    }
    state = {f"chunk{i}": chunk.sharded_state_dict(prefix="", metadata=metadata) for i, chunk in enumerate(chunks)}
    for entry in _entries(state):
        if isinstance(entry, ShardedTensor) and entry.key in _PADDED:
            entry.allow_shape_mismatch = True
    return state


def optimizer_state(optimizer: Any, model: Sharded) -> Sharded:
    """The optimizer's state for saving, gathered to the first data-parallel rank; empty on the others. A collective."""
    by_param = _by_param(model)
    state: Sharded = {}
    for part in _parts(optimizer):
        _fill_missing(part)
        for param, tensors in _whole_tensors(part):
            entry = by_param[id(param)]
            state |= {f"{name}/{entry.key}/{len(state)}": _sharded(entry, name, t) for name, t in tensors.items()}
    return state


class OptimizerTarget:
    """Where a checkpoint's optimizer state is loaded to: whole tensors first, then each rank takes its part.

    Args:
        model: from :func:`model_state`, of the same model that ``optimizer`` updates.
    """

    def __init__(self, optimizer: Any, model: Sharded) -> None:
        self.state: Sharded = {}
        self._slots: list[tuple[str, torch.Tensor, slice, torch.Size]] = []
        by_param = _by_param(model)
        for part in _parts(optimizer):
            _fill_missing(part)
            for param, target, part_of_it in _local_states(part):
                entry = by_param[id(param)]
                for name, tensor in target.items():
                    key = f"{name}/{entry.key}/{len(self.state)}"
                    self.state[key] = _sharded(entry, name, torch.zeros(param.shape, dtype=tensor.dtype))
                    self._slots.append((key, tensor, part_of_it, param.shape))

    @torch.no_grad()
    def take(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Copy what was loaded into the optimizer."""
        for key, tensor, part_of_it, shape in self._slots:
            whole = loaded[key]
            if whole.shape != shape:
                raise CheckpointError(f"optimizer state {key}: shape {tuple(whole.shape)}, expected {tuple(shape)}")
            tensor.copy_(whole.reshape(-1)[part_of_it].view_as(tensor))


def adam_step(optimizer: Any) -> int:
    """How many steps Adam has taken; one number, since every step updates every parameter."""
    steps: set[int] = set()
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            if "step" in group and group["params"]:
                steps.add(int(group["step"]))
        for state in part.optimizer.state.values():
            if "step" in state:
                steps.add(int(state["step"]))
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


def _parts(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]


def _fill_missing(part: Any) -> None:
    """Give parameters that were never updated the state that their first update would start from."""
    for group in part.optimizer.param_groups:
        for param in group["params"]:
            state = part.optimizer.state[param]
            if "exp_avg" not in state:
                if isinstance(part.optimizer, torch.optim.Adam):
                    state["step"] = torch.zeros((), dtype=torch.float32)
                state |= {name: torch.zeros_like(param) for name in _MOMENTS}


def _whole_tensors(part: Any) -> Iterator[tuple[torch.nn.Parameter, dict[str, torch.Tensor]]]:
    """Every parameter of this rank's model shard with its whole state, on data-parallel rank 0."""
    if not isinstance(part, DistributedOptimizer):
        yield from ((param, state) for param, state, _ in _local_states(part))
        return
    gathered = part.get_parameter_state_dp_zero(use_gloo_comm=part.data_parallel_group_gloo is not None)
    if gathered is None:
        return
    names = _names(part)
    for index, buffer in enumerate(part.buffers):
        (world,) = gathered[index].values()
        for param, (start, end, _) in buffer.param_index_map.items():
            yield param, {name: world[name][start:end].view(param.shape) for name in names}


def _local_states(part: Any) -> Iterator[tuple[torch.nn.Parameter, dict[str, torch.Tensor], slice]]:
    """``(parameter, its state tensors on this rank, which part of the flat parameter they are)``."""
    names = _names(part)
    if isinstance(part, DistributedOptimizer):
        for param, (group, order) in part.model_param_group_index_map.items():
            main = part.optimizer.param_groups[group]["params"][order]
            own = part._get_model_param_range_map(param)["param"]
            yield param, _tensors(part, main, names), slice(own.start, own.end)
        return
    if hasattr(part, "float16_groups"):
        pairs = [
            pair
            for model_group, main_group in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True)
            for pair in zip(model_group, main_group, strict=True)
        ] + [(p, p) for group in part.fp32_from_fp32_groups for p in group]
    else:
        pairs = [(p, p) for group in part.optimizer.param_groups for p in group["params"]]
    for param, main in pairs:
        yield param, _tensors(part, main, names if main is not param else _MOMENTS), slice(None)


def _tensors(part: Any, main: torch.Tensor, names: Sequence[str]) -> dict[str, torch.Tensor]:
    state = part.optimizer.state[main]
    return {name: main.detach() if name == _MASTER else state[name] for name in names}


def _names(part: Any) -> tuple[str, ...]:
    """The master copy is a tensor of its own only beside bfloat16 weights."""
    return (*_MOMENTS, _MASTER) if part.config.bf16 else _MOMENTS


def _sharded(entry: Any, name: str, data: torch.Tensor) -> Any:
    changes: dict[str, Any] = {"key": f"optimizer.state.{_SAVED_AS.get(name, name)}.{entry.key}", "data": data}
    if isinstance(entry, ShardedTensor):
        changes["dtype"] = data.dtype
    return replace(entry, **changes)


def _by_param(model: Sharded) -> dict[int, Any]:
    return {id(entry.data): entry for entry in _entries(model)}


def _entries(state: Sharded) -> Iterator[Any]:
    for value in nested_values(state):
        if isinstance(value, ShardedTensor | ShardedTensorFactory):
            yield value
