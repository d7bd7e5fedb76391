"""Qwen2 and Qwen2.5: dense, biases on q, k and v. DeepSeek-R1-Distill-Qwen is one of them."""

from megatron_fr.models.common import attention, dense_mlp
from megatron_fr.models.registry import Family, register

register(Family("Qwen2ForCausalLM", attention(bias=True), dense_mlp(), qkv_bias=True))
