"""What one rank holds of the whole model, under the names of the whole model."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_fr.models.spec import MappedParameter

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_LOCAL_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.")
_GROUPED_EXPERT = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
#: Transformer Engine keeps a norm inside the linear layer that follows it.
FUSED_NORMS = {
    ".self_attention.linear_qkv.layer_norm_weight": ".input_layernorm.weight",
    ".mlp.linear_fc1.layer_norm_weight": ".pre_mlp_layernorm.weight",
}


@dataclass(frozen=True)
class Placement:
    """The shard of the model that one rank holds, enough for every rank to know who holds what."""

    layers: frozenset[int]
    experts: range
    has_embedding: bool
    has_head: bool
    tp: tuple[int, int]  # rank and size
    expert_tp: tuple[int, int]

    def shard(self, entry: MappedParameter) -> tuple[int, int]:
        """Which shard of a parameter this is, and of how many."""
        return self.expert_tp if entry.mapping.per_expert else self.tp

    def holds(self, entry: MappedParameter) -> bool:
        """Whether a shard of the parameter is here."""
        if entry.layer is None:
            return self.has_embedding if entry.param.startswith("embedding.") else self.has_head
        return entry.layer in self.layers and (entry.expert is None or entry.expert in self.experts)


def _unwrap(module: Any) -> Any:
    while isinstance(getattr(module, "module", None), torch.nn.Module):
        module = module.module
    return module


def placement(chunks: Sequence[torch.nn.Module]) -> Placement:
    """Describe this rank's ``chunks``."""
    from megatron.core import parallel_state as mpu

    models = [_unwrap(chunk) for chunk in chunks]
    each = (models[0].config.num_moe_experts or 0) // mpu.get_expert_model_parallel_world_size()
    first = mpu.get_expert_model_parallel_rank() * each
    return Placement(
        layers=frozenset(layer.layer_number - 1 for model in models for layer in model.decoder.layers),
        experts=range(first, first + each),
        has_embedding=any(model.pre_process for model in models),
        has_head=any(model.post_process for model in models),
        tp=(mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()),
        expert_tp=(mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size()),
    )


def parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """This rank's parameters and persistent buffers by their names in the whole model, local layers' spelling.

    Layer and expert numbers become global, and Transformer Engine's fused norms and grouped experts get the names
    that Megatron-Core's local layers have: ``decoder.layers.0.mlp.experts.linear_fc1.weight2`` on EP rank 1 of a
    second pipeline stage becomes ``decoder.layers.24.mlp.experts.local_experts.66.linear_fc1.weight``.
    """
    found: dict[str, torch.Tensor] = {}
    first_expert = placement(chunks).experts.start
    for model in map(_unwrap, chunks):
        numbers = [layer.layer_number for layer in model.decoder.layers]
        kept = model.state_dict(keep_vars=True)
        buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in kept)
        for name, tensor in itertools.chain(model.named_parameters(), buffers):
            found[whole_name(name, numbers, first_expert)] = tensor
    return found


def whole_name(name: str, layer_numbers: Sequence[int], first_expert: int) -> str:
    """A parameter's name in the whole model, from its name on a rank whose layers have these numbers, from 1."""
    for fused, plain in FUSED_NORMS.items():
        name = re.sub(f"{re.escape(fused)}$", plain, name)
    name = _GROUPED_EXPERT.sub(r".mlp.experts.local_experts.\2.\1.weight", name)
    name = _LAYER.sub(lambda m: f"decoder.layers.{layer_numbers[int(m[1])] - 1}.", name)
    return _LOCAL_EXPERT.sub(lambda m: f".mlp.experts.local_experts.{int(m[1]) + first_expert}.", name)
