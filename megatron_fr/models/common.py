"""Rules that the Qwen families share."""

from __future__ import annotations

from megatron_fr.models.mappings import QKV, Copy, GatedMLP, RowParallel, Rule, VocabParallel

_HF = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."

EMBEDDING: tuple[Rule, ...] = (VocabParallel("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),)

FINAL_NORM: tuple[Rule, ...] = (Copy("decoder.final_layernorm.weight", ("model.norm.weight",), ("hidden",)),)

#: Left out for models whose head is tied to the embedding.
HEAD = VocabParallel("output_layer.weight", ("lm_head.weight",))


def norm(param: str, hf: str, size: str = "hidden") -> Rule:
    """A layer's norm weight."""
    return Copy(f"{_MEGATRON}{param}.weight", (f"{_HF}{hf}.weight",), (size,))


def attention(*, bias: bool = False, qk_norm: bool = False) -> tuple[Rule, ...]:
    """Input norm, projections, and what the family adds: biases of q, k and v, or norms of queries and keys."""
    qkv, prefix = f"{_MEGATRON}self_attention.linear_qkv.", f"{_HF}self_attn."
    rules: list[Rule] = [
        norm("input_layernorm", "input_layernorm"),
        QKV(f"{qkv}weight", tuple(f"{prefix}{name}_proj.weight" for name in "qkv")),
    ]
    if bias:
        rules.append(QKV(f"{qkv}bias", tuple(f"{prefix}{name}_proj.bias" for name in "qkv"), bias=True))
    if qk_norm:
        rules.append(norm("self_attention.q_layernorm", "self_attn.q_norm", "head_dim"))
        rules.append(norm("self_attention.k_layernorm", "self_attn.k_norm", "head_dim"))
    rules.append(
        RowParallel(f"{_MEGATRON}self_attention.linear_proj.weight", (f"{prefix}o_proj.weight",), ("hidden", "q_size"))
    )
    return tuple(rules)


def dense_mlp() -> tuple[Rule, ...]:
    """The norm before the MLP, and the gated MLP."""
    return (norm("pre_mlp_layernorm", "post_attention_layernorm"), *_mlp("mlp.", "mlp.", "ffn"))


def moe_mlp() -> tuple[Rule, ...]:
    """The norm before the experts, the router, and every expert's gated MLP."""
    return (
        norm("pre_mlp_layernorm", "post_attention_layernorm"),
        Copy(f"{_MEGATRON}mlp.router.weight", (f"{_HF}mlp.gate.weight",), ("experts", "hidden")),
        *_mlp("mlp.experts.local_experts.{expert}.", "mlp.experts.{expert}.", "moe_ffn"),
    )


def _mlp(param: str, hf: str, width: str) -> tuple[Rule, ...]:
    return (
        GatedMLP(
            f"{_MEGATRON}{param}linear_fc1.weight", (f"{_HF}{hf}gate_proj.weight", f"{_HF}{hf}up_proj.weight"), width
        ),
        RowParallel(f"{_MEGATRON}{param}linear_fc2.weight", (f"{_HF}{hf}down_proj.weight",), ("hidden", width)),
    )
