"""Qwen3-MoE: norms on queries and keys, every MLP a mixture of experts."""

from megatron_fr.bridge.common import attention, moe_mlp
from megatron_fr.bridge.registry import Family, register

register(Family("Qwen3MoeForCausalLM", attention(qk_norm=True) + moe_mlp(), qk_norm=True))
