"""GLM-4.5 and GLM-4.5-Air: a sigmoid router with a correction bias, and an expert that every token takes.

The first layers are dense, and half of each head is rotated. A layer for multi-token prediction
(``num_nextn_predict_layers``) takes no part in training: its weights are left out, of saved models too, so that an
engine cannot draft with them. The correction bias is served and saved as it was loaded; no update changes it.
"""

from megatron_fr.models.common import ConfigFields, attention, common_fields, dense_mlp, gated_mlp, moe_mlp, replicated
from megatron_fr.models.mappings import Buffer
from megatron_fr.models.spec import ModelSpec


def describe(config: ConfigFields) -> ModelSpec:
    """Read the fields of a configuration; see :func:`~megatron_fr.models.common.common_fields` for errors."""
    config.only("norm_topk_prob", True)
    config.only("n_group", 1)
    config.only("topk_group", 1)
    common = common_fields(config)
    layers, width = common["layers"], config.number("moe_intermediate_size")
    first_moe, extra = config.get("first_k_dense_replace", 0), config.get("num_nextn_predict_layers", 0)
    bias, qk_norm = config.get("attention_bias", False), config.get("use_qk_norm", False)
    rotary_percent = config.number("rope_parameters.partial_rotary_factor", 1.0)
    config.only("partial_rotary_factor", rotary_percent, rotary_percent)
    correction = ("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", "experts")
    shared = gated_mlp("mlp.shared_experts.", "mlp.shared_experts.", "shared_ffn")
    return ModelSpec(
        architecture="Glm4MoeForCausalLM",
        attention=attention(bias=bias, qk_norm=qk_norm),
        dense_mlp=dense_mlp(),
        moe_mlp=(*moe_mlp(), replicated(*correction, kind=Buffer), *shared),
        qkv_bias=bias,
        qk_norm=qk_norm,
        experts=config.number("n_routed_experts"),
        moe_ffn=width,
        shared_ffn=width * config.number("n_shared_experts"),
        top_k=config.number("num_experts_per_tok"),
        moe_layers=tuple(range(first_moe, layers)),
        rotary_percent=rotary_percent,
        transformer={
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_topk_scaling_factor": config.number("routed_scaling_factor", 1.0),
        },
        unused_tensors=tuple(f"model.layers.{layers + layer}." for layer in range(extra)),
        **common,
    )
