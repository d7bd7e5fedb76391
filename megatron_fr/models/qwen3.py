"""Qwen3: dense, norms on queries and keys."""

from megatron_fr.models.common import ConfigFields, attention, common_fields, dense_mlp
from megatron_fr.models.spec import ModelSpec


def describe(config: ConfigFields) -> ModelSpec:
    """Read the fields of a configuration; see :func:`~megatron_fr.models.common.common_fields` for errors."""
    config.only("attention_bias", False, False)
    return ModelSpec(
        architecture="Qwen3ForCausalLM",
        attention=attention(qk_norm=True),
        dense_mlp=dense_mlp(),
        qk_norm=True,
        **common_fields(config),
    )
