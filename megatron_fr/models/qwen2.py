"""Qwen2 and Qwen2.5: dense, biases on q, k and v. DeepSeek-R1-Distill-Qwen is one of them."""

from megatron_fr.models.common import ConfigFields, attention, common_fields, dense_mlp
from megatron_fr.models.spec import ModelSpec


def describe(config: ConfigFields) -> ModelSpec:
    """Read the fields of a configuration; see :func:`~megatron_fr.models.common.common_fields` for errors."""
    return ModelSpec(
        architecture="Qwen2ForCausalLM",
        attention=attention(bias=True),
        dense_mlp=dense_mlp(),
        qkv_bias=True,
        **common_fields(config),
    )
