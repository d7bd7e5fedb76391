"""Qwen3-MoE: norms on queries and keys, MLPs that are mixtures of experts, in all layers or some."""

from megatron_fr.models.common import ConfigFields, attention, common_fields, dense_mlp, moe_mlp
from megatron_fr.models.spec import ModelSpec

_MIXED = "only some of its layers have experts (decoder_sparse_step, mlp_only_layers); SGLang builds experts in all"


def describe(config: ConfigFields) -> ModelSpec:
    """Read the fields of a configuration; see :func:`~megatron_fr.models.common.common_fields` for errors.

    Every ``decoder_sparse_step``-th layer has experts, except those in ``mlp_only_layers``.
    """
    config.only("attention_bias", False, False)
    common = common_fields(config)
    step, dense = config.number("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    moe_layers = tuple(n for n in range(common["layers"]) if n not in dense and (n + 1) % step == 0)
    return ModelSpec(
        architecture="Qwen3MoeForCausalLM",
        attention=attention(qk_norm=True),
        dense_mlp=dense_mlp(),
        moe_mlp=moe_mlp(),
        qk_norm=True,
        experts=config.number("num_experts"),
        moe_ffn=config.number("moe_intermediate_size"),
        top_k=config.number("num_experts_per_tok"),
        moe_layers=moe_layers,
        # Softmax over the chosen logits equals softmax over all, renormalised over the chosen.
        transformer={"moe_router_pre_softmax": not config.get("norm_topk_prob")},
        unserved=None if len(moe_layers) in (0, common["layers"]) else _MIXED,
        **common,
    )
