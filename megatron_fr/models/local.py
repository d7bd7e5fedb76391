"""What one rank holds of the whole model, under the names of the whole model."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_LOCAL_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.")
_GROUPED_EXPERT = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
#: Transformer Engine keeps a norm inside the linear layer that follows it.
_FUSED_NORMS = (
    (".self_attention.linear_qkv.layer_norm_weight", ".input_layernorm.weight"),
    (".mlp.linear_fc1.layer_norm_weight", ".pre_mlp_layernorm.weight"),
)


@dataclass(frozen=True)
class Placement:
    """The shard of the model that one rank holds, enough for every rank to know who holds what."""

    layers: frozenset[int]
    experts: range
    has_embedding: bool
    has_head: bool
    tp_rank: int
    tp_size: int
    expert_tp_rank: int
    expert_tp_size: int


def unwrap(module: Any) -> Any:
    """The GPT model inside wrappers such as ``DistributedDataParallel``."""
    while isinstance(getattr(module, "module", None), torch.nn.Module):
        module = module.module
    return module


def placement(chunks: Sequence[torch.nn.Module]) -> Placement:
    """Describe this rank's ``chunks``."""
    from megatron.core import parallel_state

    models = [unwrap(chunk) for chunk in chunks]
    return Placement(
        layers=frozenset(layer.layer_number - 1 for model in models for layer in model.decoder.layers),
        experts=_local_experts(models),
        has_embedding=any(model.pre_process for model in models),
        has_head=any(model.post_process for model in models),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        expert_tp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        expert_tp_size=parallel_state.get_expert_tensor_parallel_world_size(),
    )


def parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """This rank's parameters and persistent buffers by their names in the whole model, local layers' spelling.

    Layer and expert numbers become global, and Transformer Engine's fused norms and grouped experts get the names
    that Megatron-Core's local layers have: ``decoder.layers.0.mlp.experts.linear_fc1.weight2`` on EP rank 1 of a
    second pipeline stage becomes ``decoder.layers.24.mlp.experts.local_experts.66.linear_fc1.weight``.
    """
    found: dict[str, torch.Tensor] = {}
    models = [unwrap(chunk) for chunk in chunks]
    first_expert = _local_experts(models).start
    for model in models:
        layers = model.decoder.layers
        kept = model.state_dict(keep_vars=True)
        buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in kept)
        for name, tensor in itertools.chain(model.named_parameters(), buffers):
            found[_whole_name(name, layers, first_expert)] = tensor
    return found


def _whole_name(name: str, layers: Sequence[Any], first_expert: int) -> str:
    for fused, plain in _FUSED_NORMS:
        if name.endswith(fused):
            name = name.removesuffix(fused) + plain
    name = _GROUPED_EXPERT.sub(r".mlp.experts.local_experts.\2.\1.weight", name)
    name = _LAYER.sub(lambda m: f"decoder.layers.{layers[int(m[1])].layer_number - 1}.", name)
    return _LOCAL_EXPERT.sub(lambda m: f".mlp.experts.local_experts.{int(m[1]) + first_expert}.", name)


def _local_experts(models: Sequence[Any]) -> range:
    from megatron.core import parallel_state

    experts = models[0].config.num_moe_experts or 0
    each = experts // parallel_state.get_expert_model_parallel_world_size()
    start = parallel_state.get_expert_model_parallel_rank() * each
    return range(start, start + each)
