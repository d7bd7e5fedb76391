"""Qwen3: dense, norms on queries and keys."""

from megatron_fr.models.common import attention, dense_mlp
from megatron_fr.models.registry import Family, register

register(Family("Qwen3ForCausalLM", attention(qk_norm=True), dense_mlp(), qk_norm=True))
