"""Names of parameters on a rank, and in the whole model."""

from __future__ import annotations

import pytest

from megatron_fr.models.local import whole_name

#: Layers of the second of two pipeline stages of two layers each, counted from 1.
LAYERS = [3, 4]


@pytest.mark.parametrize(
    ("local", "whole"),
    [
        ("decoder.layers.1.input_layernorm.weight", "decoder.layers.3.input_layernorm.weight"),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.2.input_layernorm.weight"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.2.pre_mlp_layernorm.weight"),
        ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.2.mlp.linear_fc1.weight"),
        (
            "decoder.layers.1.mlp.experts.linear_fc1.weight2",
            "decoder.layers.3.mlp.experts.local_experts.10.linear_fc1.weight",
        ),
        (
            "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight",
            "decoder.layers.3.mlp.experts.local_experts.11.linear_fc2.weight",
        ),
        ("output_layer.weight", "output_layer.weight"),
    ],
)
def test_layers_and_experts_become_global_and_fused_names_plain(local: str, whole: str) -> None:
    assert whole_name(local, LAYERS, first_expert=8) == whole
