"""Models and layouts that are not supported: one clear error before anything is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_fr.config import ParallelConfig
from megatron_fr.errors import ConfigError, ModelError
from megatron_fr.models.registry import model_spec
from megatron_fr.runtime.device import prepare_process, resolve_device
from megatron_fr.trainer.model import build_transformer_config, uses_sequence_parallel
from tools.tiny.model import tiny_config

DEVICE = resolve_device("cpu")
prepare_process(DEVICE)


def _build(family: Any, changes: dict[str, Any], parallel: dict[str, Any], **arguments: Any) -> Any:
    hf_config = tiny_config(family)
    for name, value in changes.items():
        setattr(hf_config, name, value)
    return build_transformer_config(
        model_spec(hf_config), ParallelConfig(**parallel), DEVICE, dtype=torch.float32, **arguments
    )


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope_type='yarn'"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ("qwen3", {"sliding_window": 4096}, "sliding_window=4096"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("qwen3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ("qwen3", {"rope_parameters": {"rope_type": "default"}}, "rope_theta is None"),
        ("qwen3_moe", {"n_shared_experts": 1}, "n_shared_experts=1"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size=64"),
        ("qwen3_moe", {"first_k_dense_replace": 1}, "first_k_dense_replace=1"),
        ("qwen3_moe", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        ("qwen3_moe", {"routed_scaling_factor": 2.5}, "routed_scaling_factor=2.5"),
        ("qwen2", {"kv_lora_rank": 512}, "kv_lora_rank=512"),
        ("qwen2", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("qwen2", {"head_dim": 0}, "head_dim is 0"),
    ],
)
def test_an_unsupported_model_names_the_field(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        _build(family, changes, {})


@pytest.mark.parametrize(
    ("family", "parallel", "message"),
    [
        ("qwen3_moe", {"world_size": 4, "tp": 4}, r"parallel\.tp=4 .*KV heads \(2\)"),
        ("qwen3_moe", {"world_size": 3, "pp": 3}, r"parallel\.pp=3 .*layers \(2\)"),
        ("qwen3_moe", {"world_size": 3, "ep": 3}, r"parallel\.ep=3 .*experts \(8\)"),
        ("qwen3_moe", {"world_size": 2, "etp": 2}, r"parallel\.etp=2 with .*gloo cannot gather; on CPUs give ep=1"),
        ("qwen3_moe", {"world_size": 4, "tp": 2, "ep": 2, "etp": 2}, r"parallel\.etp=2 with parallel\.ep=2"),
        ("qwen3_moe", {"world_size": 3, "etp": 3}, r"parallel\.etp=3 .*width \(80\)"),
        ("glm4_moe", {"world_size": 3, "pp": 3}, r"parallel\.pp=3 .*layers \(2\)"),
        ("qwen2", {"world_size": 2, "ep": 2}, r"parallel\.ep=2.*no experts"),
        (
            "qwen3_moe",
            {"world_size": 2, "pp": 2, "vpp": 2},
            r"parallel\.pp x parallel\.vpp=4 .*layers \(2\)",
        ),
        ("qwen3_moe", {"world_size": 2, "tp": 2, "sequence_parallel": False}, r"parallel\.sequence_parallel=false"),
    ],
)
def test_a_layout_that_does_not_fit_names_the_field(family: str, parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _build(family, {}, parallel)


def test_sequence_parallelism_is_on_exactly_for_experts_under_tensor_parallelism() -> None:
    moe, dense = model_spec(tiny_config("qwen3_moe")), model_spec(tiny_config("qwen2"))
    two = ParallelConfig(world_size=2, tp=2)
    assert uses_sequence_parallel(moe, two)
    assert not uses_sequence_parallel(moe, ParallelConfig())
    assert not uses_sequence_parallel(dense, two)
    assert uses_sequence_parallel(dense, ParallelConfig(world_size=2, tp=2, sequence_parallel=True))


def test_the_router_is_plain_top_k_in_float32_without_auxiliary_loss() -> None:
    config = _build("qwen3_moe", {}, {})
    assert config.moe_router_load_balancing_type == "none"
    assert config.moe_aux_loss_coeff == 0
    assert config.moe_router_dtype == "fp32"
    assert not config.moe_router_pre_softmax
    assert _build("qwen3_moe", {"norm_topk_prob": False}, {}).moe_router_pre_softmax


def test_the_router_of_a_glm_keeps_its_bias_and_scales_its_sigmoid_scores() -> None:
    config = _build("glm4_moe", {}, {})
    assert (config.moe_router_score_function, config.moe_router_topk_scaling_factor) == ("sigmoid", 1.5)
    assert config.moe_router_enable_expert_bias
    assert config.moe_router_bias_update_rate == 0
    assert config.moe_shared_expert_intermediate_size == 80
    assert config.moe_layer_freq == [0, 1]
    assert _build("qwen3_moe", {}, {}).moe_shared_expert_intermediate_size is None


def test_a_load_balancing_loss_needs_experts() -> None:
    with pytest.raises(ConfigError, match=r"train\.moe_aux_loss_coeff=0\.01: the model has no experts"):
        _build("qwen2", {}, {}, aux_loss_coeff=0.01)
    with pytest.raises(ConfigError, match=r"train\.moe_aux_loss_coeff=0\.01: .* correction bias; set it to 0"):
        _build("glm4_moe", {}, {}, aux_loss_coeff=0.01)
    config = _build("qwen3_moe", {}, {}, aux_loss_coeff=0.01)
    assert (config.moe_router_load_balancing_type, config.moe_aux_loss_coeff) == ("aux_loss", 0.01)
