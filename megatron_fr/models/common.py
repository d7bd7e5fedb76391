"""What families share: the fields that every configuration has, and weight mappings."""

from __future__ import annotations

from typing import Any

from megatron_fr.models.fields import ConfigFields
from megatron_fr.models.mappings import QKV, Copy, GatedMLP, RowParallel, WeightMapping

#: Prefixes of a layer's tensors in Hugging Face files and of its parameters in Megatron-Core.
LAYER = "model.layers.{layer}."
PARAM = "decoder.layers.{layer}."


def common_fields(config: ConfigFields) -> dict[str, Any]:
    """Arguments of :class:`~megatron_fr.models.spec.ModelSpec` that every family reads alike.

    Raises:
        ModelError: a field has a value that no family supports.
    """
    config.only("hidden_act", "silu")
    config.only("rope_parameters.rope_type", "default", "default")
    config.only("use_sliding_window", False, False)
    layers, hidden, heads = map(config.number, ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    config.only("layer_types", ["full_attention"] * layers, ["full_attention"] * layers)
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.number("num_key_value_heads"),
        "head_dim": config.number("head_dim", hidden // heads),
        "ffn": config.number("intermediate_size"),
        "vocab": config.number("vocab_size"),
        "tie": config.get("tie_word_embeddings", False),
        "norm_eps": config.number("rms_norm_eps"),
        "rope_theta": config.number("rope_parameters.rope_theta"),
        "max_positions": config.number("max_position_embeddings"),
        "quantized": config.get("quantization_config") is not None,
    }


def norm(param: str, hf: str, size: str = "hidden") -> WeightMapping:
    """A layer's norm weight."""
    return Copy(f"{PARAM}{param}.weight", (f"{LAYER}{hf}.weight",), (size,))


def attention(*, bias: bool = False, qk_norm: bool = False) -> tuple[WeightMapping, ...]:
    """Input norm, projections, and what the family adds: biases of q, k and v, or norms of queries and keys."""
    qkv, prefix = f"{PARAM}self_attention.linear_qkv.", f"{LAYER}self_attn."
    weights: list[WeightMapping] = [
        norm("input_layernorm", "input_layernorm"),
        QKV(f"{qkv}weight", tuple(f"{prefix}{name}_proj.weight" for name in "qkv")),
    ]
    if bias:
        weights.append(QKV(f"{qkv}bias", tuple(f"{prefix}{name}_proj.bias" for name in "qkv"), bias=True))
    if qk_norm:
        weights.append(norm("self_attention.q_layernorm", "self_attn.q_norm", "head_dim"))
        weights.append(norm("self_attention.k_layernorm", "self_attn.k_norm", "head_dim"))
    weights.append(
        RowParallel(f"{PARAM}self_attention.linear_proj.weight", (f"{prefix}o_proj.weight",), ("hidden", "q_size"))
    )
    return tuple(weights)


def dense_mlp() -> tuple[WeightMapping, ...]:
    """The norm before the MLP, and the gated MLP."""
    return (norm("pre_mlp_layernorm", "post_attention_layernorm"), *gated_mlp("mlp.", "mlp.", "ffn"))


def moe_mlp() -> tuple[WeightMapping, ...]:
    """The norm before the experts, the router, and every expert's gated MLP."""
    return (
        norm("pre_mlp_layernorm", "post_attention_layernorm"),
        Copy(f"{PARAM}mlp.router.weight", (f"{LAYER}mlp.gate.weight",), ("experts", "hidden")),
        *gated_mlp("mlp.experts.local_experts.{expert}.", "mlp.experts.{expert}.", "moe_ffn"),
    )


def gated_mlp(param: str, hf: str, width: str) -> tuple[WeightMapping, ...]:
    """The two matrices of a gated MLP under these prefixes; ``width`` names its size."""
    return (
        GatedMLP(
            f"{PARAM}{param}linear_fc1.weight",
            (f"{LAYER}{hf}gate_proj.weight", f"{LAYER}{hf}up_proj.weight"),
            width,
        ),
        RowParallel(f"{PARAM}{param}linear_fc2.weight", (f"{LAYER}{hf}down_proj.weight",), ("hidden", width)),
    )
