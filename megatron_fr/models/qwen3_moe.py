"""Qwen3-MoE: norms on queries and keys, MLPs that are mixtures of experts, in all layers or some."""

from megatron_fr.models.common import attention, dense_mlp, moe_mlp
from megatron_fr.models.registry import Family, register

register(Family("Qwen3MoeForCausalLM", attention(qk_norm=True), dense_mlp(), moe_mlp(), qk_norm=True))
