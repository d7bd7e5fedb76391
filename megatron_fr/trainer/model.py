"""The policy as a Megatron-Core GPT model, from its Hugging Face configuration."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_fr.config import ParallelConfig, RunConfig
from megatron_fr.errors import ConfigError
from megatron_fr.models.layers.aux_loss import BalancedRouter
from megatron_fr.models.layers.local import CoreAttention, RMSNorm
from megatron_fr.models.layouts import check_aux_loss, check_layout, uses_sequence_parallel
from megatron_fr.models.spec import ModelSpec
from megatron_fr.runtime.device import Device


def build_transformer_config(
    spec: ModelSpec,
    parallel: ParallelConfig,
    device: Device,
    *,
    dtype: torch.dtype,
    transformer_impl: str = "local",
    recompute: str = "off",
    routing_replay: bool = False,
    aux_loss_coeff: float = 0.0,
) -> Any:
    """Megatron-Core's ``TransformerConfig`` for a model; ``dtype`` is that of parameters and activations.

    Raises:
        ConfigError: the model cannot be split as ``parallel`` says, or has no experts to balance.
    """
    check_aux_loss(spec, aux_loss_coeff)
    check_layout(spec, parallel)
    if device.kind == "cpu" and parallel.etp > 1 and (parallel.ep > 1 or parallel.tp % parallel.etp):
        raise ConfigError(
            f"parallel.etp={parallel.etp} with parallel.ep={parallel.ep} and parallel.tp={parallel.tp}: its ranks have "
            "unequal numbers of tokens, which gloo cannot gather; on CPUs give ep=1 and a tp that is a multiple of etp"
        )
    # One expert's normalised weight is always 1; Megatron-Core computes it, but refuses to be told so.
    only_one = spec.moe and spec.top_k == 1 and spec.transformer.get("moe_router_pre_softmax") is False
    moe: dict[str, Any] = {}
    if spec.moe:
        moe = {
            "num_moe_experts": spec.experts,
            "moe_ffn_hidden_size": spec.moe_ffn,
            "moe_shared_expert_intermediate_size": spec.shared_ffn or None,
            "moe_router_topk": spec.top_k,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "aux_loss" if aux_loss_coeff else "none",
            "moe_aux_loss_coeff": aux_loss_coeff,
            "moe_grouped_gemm": transformer_impl == "te",
            "moe_enable_routing_replay": routing_replay,
            # Only where layers differ: a list also changes how Megatron-Core names the tensors of a checkpoint.
            **({} if all(pattern := _moe_pattern(spec)) else {"moe_layer_freq": pattern}),
        }
    config = TransformerConfig(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        num_query_groups=spec.kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        sequence_parallel=uses_sequence_parallel(spec, parallel),
        moe_token_dispatcher_type="alltoall",  # the only one that takes variable lengths, also for dense models
        variable_seq_lengths=True,  # micro-batches are as long as their longest trajectory
        # Between two ranks, messages of both directions in one call would be mistaken for each other.
        overlap_p2p_comm=parallel.vpp > 1,
        batch_p2p_comm=parallel.vpp == 1,
        deallocate_pipeline_outputs=device.kind == "cuda",
        bias_activation_fusion=device.kind == "cuda",
        bias_dropout_fusion=device.kind == "cuda",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,  # every parameter is loaded, and the loader checks that
        recompute_granularity=None if recompute == "off" else recompute,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
        recompute_modules=["core_attn"],  # of "selective"
        **moe,
        **(dict(spec.transformer) | ({"moe_router_pre_softmax": True} if only_one else {})),
    )
    config.moe_router_pre_softmax = config.moe_router_pre_softmax and not only_one
    return config


def build_model(
    spec: ModelSpec, run_config: RunConfig, device: Device, *, routing_replay: bool = True
) -> list[torch.nn.Module]:
    """This rank's part of the model on its device: one chunk a virtual pipeline stage, weights not set.

    The forward takes ``input_ids`` and ``position_ids`` int64 ``[batch, sequence]`` and no mask: it is causal. The last
    pipeline stage gives vocabulary-parallel logits ``[batch, sequence, padded_vocab / TP]``, of which columns from
    ``vocab_size`` on are garbage. Under sequence parallelism the sequence length must be a multiple of TP.

    ``routing_replay=False`` overrides ``train.routing_replay``.

    Raises:
        ConfigError: see :func:`build_transformer_config`.
    """
    train, parallel = run_config.train, run_config.parallel
    implementation = device.transformer_impl(run_config.model.transformer_impl)
    config = build_transformer_config(
        spec,
        parallel,
        device,
        dtype=getattr(torch, run_config.model.dtype),
        transformer_impl=implementation,
        recompute=train.recompute,
        routing_replay=routing_replay and spec.moe and train.routing_replay != "off",
        aux_loss_coeff=train.moe_aux_loss_coeff,
    )
    chunks = []
    for stage in range(parallel.vpp) if parallel.vpp > 1 else [None]:
        model = GPTModel(
            config,
            _block_spec(config, spec, implementation, stage),
            vocab_size=spec.padded_vocab(parallel.tp),
            max_sequence_length=spec.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            parallel_output=True,
            share_embeddings_and_output_weights=spec.tie,
            position_embedding_type="rope",
            rotary_percent=spec.rotary_percent,
            rotary_base=spec.rope_theta,
            vp_stage=stage,
        )
        chunks.append(model.to(device.torch_device))
    return chunks


def _moe_pattern(spec: ModelSpec) -> list[int]:
    return [int(layer in spec.moe_layers) for layer in range(spec.layers)]


def _block_spec(config: Any, spec: ModelSpec, implementation: str, stage: int | None) -> Any:
    """The one place that chooses between Transformer Engine's layers and Megatron-Core's own."""
    make, layer_norm = _local_layer, RMSNorm
    if implementation == "te":
        from megatron.core.extensions.transformer_engine import TENorm  # needs Transformer Engine

        make, layer_norm = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec, TENorm
    pattern = _moe_pattern(spec)
    kinds = {
        moe: make(
            num_experts=config.num_moe_experts if moe else None,
            moe_grouped_gemm=config.moe_grouped_gemm and bool(moe),
            qk_layernorm=config.qk_layernorm,
        )
        for moe in set(pattern)
    }
    if config.moe_aux_loss_coeff:
        kinds[1].submodules.mlp.keywords["submodules"].router = BalancedRouter
    first = get_transformer_layer_offset(config, stage)
    here = pattern[first : first + get_num_layers_to_build(config, stage)]
    return TransformerBlockSubmodules(layer_specs=[kinds[moe] for moe in here], layer_norm=layer_norm)


def _local_layer(*, num_experts: int | None, qk_layernorm: bool, moe_grouped_gemm: bool) -> Any:
    layer = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts, moe_grouped_gemm, qk_layernorm=qk_layernorm, normalization="RMSNorm"
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CoreAttention
    if qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if num_experts:
        # Transformer Engine's layers fuse the norm into a dense MLP only: the same name in checkpoints of both.
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")
    return layer
