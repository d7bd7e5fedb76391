"""The policy as a Megatron-Core GPT model, from its Hugging Face configuration."""

from __future__ import annotations

from typing import Any

import torch

from megatron_fr.config import RunConfig
from megatron_fr.config.sections import ParallelConfig
from megatron_fr.models.layouts import check_aux_loss, check_layout, uses_sequence_parallel
from megatron_fr.models.mappings import Sizes
from megatron_fr.models.spec import ModelSpec
from megatron_fr.runtime.device import Device


def torch_dtype(name: str) -> torch.dtype:
    """``model.dtype`` as torch knows it."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


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
    """Megatron-Core's ``TransformerConfig`` for a model.

    Args:
        dtype: of parameters and activations.
        transformer_impl: ``te`` or ``local``, see :meth:`megatron_fr.runtime.device.Device.transformer_impl`.
        recompute: ``train.recompute``, what is made again in the backward pass.
        routing_replay: build routers that can replay experts.
        aux_loss_coeff: ``train.moe_aux_loss_coeff``, see :mod:`megatron_fr.models.layers.aux_loss`.

    Raises:
        ConfigError: the model cannot be split as ``parallel`` says, or has no experts to balance.
    """
    from megatron.core.transformer import TransformerConfig

    check_aux_loss(spec, aux_loss_coeff)
    check_layout(spec, parallel)
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
            **({} if len(spec.moe_layers) == spec.layers else {"moe_layer_freq": _moe_pattern(spec)}),
        }
    return TransformerConfig(
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
        attention_softmax_in_fp32=True,
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
        calculate_per_token_loss=False,
        gradient_accumulation_fusion=False,  # needs kernels of Apex that a plain install lacks
        bias_activation_fusion=device.kind == "cuda",
        bias_dropout_fusion=device.kind == "cuda",
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,  # every parameter is loaded, and the loader checks that
        recompute_granularity=None if recompute == "off" else recompute,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
        recompute_modules=["core_attn"],  # of "selective"
        **moe,
        **spec.transformer,
    )


def build_model(
    spec: ModelSpec, run_config: RunConfig, device: Device, *, routing_replay: bool | None = None
) -> list[torch.nn.Module]:
    """This rank's part of the model, on its device, weights not set: call :func:`load_hf_weights` next.

    The forward takes ``input_ids`` and ``position_ids`` int64 ``[batch, sequence]`` and ``attention_mask`` None
    (causal; right-padded batches need no mask, packed ones need ``packed_seq_params``), and gives vocabulary-parallel
    logits ``[batch, sequence, padded_vocab / TP]`` on the last pipeline stage. The vocabulary is padded to a multiple
    of TP: columns of ids from ``vocab_size`` on are garbage and must take no part in a softmax. Under sequence
    parallelism the sequence length must be a multiple of the TP size.

    Args:
        routing_replay: None: as ``train.routing_replay`` says, for models with experts.

    Returns:
        One chunk a virtual pipeline stage, as Megatron-Core's schedules and wrappers take them.

    Raises:
        ConfigError: see :func:`build_transformer_config`.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    implementation = device.transformer_impl(run_config.model.transformer_impl)
    if routing_replay is None:
        routing_replay = run_config.train.routing_replay != "off"
    config = build_transformer_config(
        spec,
        run_config.parallel,
        device,
        dtype=torch_dtype(run_config.model.dtype),
        transformer_impl=implementation,
        recompute=run_config.train.recompute,
        routing_replay=routing_replay and spec.moe,
        aux_loss_coeff=run_config.train.moe_aux_loss_coeff,
    )
    virtual = run_config.parallel.vpp
    chunks = []
    for stage in range(virtual) if virtual > 1 else [None]:
        model = GPTModel(
            config,
            _block_spec(config, spec, implementation, stage),
            vocab_size=spec.padded_vocab(run_config.parallel.tp),
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


def _moe_pattern(sizes: Sizes) -> list[int]:
    return [int(layer in sizes.moe_layers) for layer in range(sizes.layers)]


def _block_spec(config: Any, sizes: Sizes, implementation: str, stage: int | None) -> Any:
    """The one place that chooses between Transformer Engine's layers and Megatron-Core's own.

    Args:
        stage: virtual pipeline stage, None without interleaving.
    """
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    if implementation == "te":
        from megatron.core.extensions.transformer_engine import TENorm as layer_norm

        make = _te_layer
    else:
        from megatron_fr.models.layers.local import RMSNorm as layer_norm

        make = _local_layer
    kinds = {moe: make(config, moe) for moe in set(_moe_pattern(sizes))}
    if config.moe_aux_loss_coeff:
        from megatron_fr.models.layers.aux_loss import BalancedRouter

        kinds[1].submodules.mlp.keywords["submodules"].router = BalancedRouter
    first = get_transformer_layer_offset(config, stage)
    here = _moe_pattern(sizes)[first : first + get_num_layers_to_build(config, stage)]
    return TransformerBlockSubmodules(layer_specs=[kinds[moe] for moe in here], layer_norm=layer_norm)


def _te_layer(config: Any, moe: int) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs as specs

    return specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if moe else None,
        moe_grouped_gemm=config.moe_grouped_gemm and bool(moe),
        qk_layernorm=config.qk_layernorm,
    )


def _local_layer(config: Any, moe: int) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs as specs

    from megatron_fr.models.layers.local import CoreAttention, RMSNorm

    layer = specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if moe else None,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if moe:
        # Transformer Engine's layers fuse the norm into a dense MLP only: the same name in checkpoints of both.
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")
    return layer
