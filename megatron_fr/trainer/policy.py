"""The policy and everything that updates it, assembled from the run's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_fr.checkpoint.io import load_weights
from megatron_fr.config import OptimizerConfig, ParallelConfig, RunConfig
from megatron_fr.hf.export import iter_hf_tensors
from megatron_fr.hf.folder import read_spec, resolve_folder
from megatron_fr.hf.model import load_hf_weights, save_hf_folder
from megatron_fr.models.layouts import uses_sequence_parallel
from megatron_fr.models.spec import ModelSpec
from megatron_fr.runtime.device import Device
from megatron_fr.trainer.data.batch import BatchLayout, RouteShape
from megatron_fr.trainer.logprob import LogprobSettings
from megatron_fr.trainer.model import build_model
from megatron_fr.trainer.objective import ContextGroup, Objective
from megatron_fr.trainer.routing_replay import RoutingReplay
from megatron_fr.trainer.step import LogprobHead, TrainStep


@dataclass
class Policy:
    """One rank's share of the model, and its update."""

    spec: ModelSpec
    source: Path
    chunks: Sequence[torch.nn.Module]  # of Megatron-Core, bare
    step: TrainStep
    route_shape: RouteShape | None  # None where nothing is replayed
    layout: BatchLayout

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Current weights under their Hugging Face names; a collective, data on global rank 0 only."""
        return iter_hf_tensors(self.chunks, self.spec)

    def save_hf(self, folder: Path) -> None:
        """Write a complete Hugging Face folder; a collective."""
        save_hf_folder(self.chunks, self.spec, self.source, folder)


def build_policy(config: RunConfig, device: Device) -> Policy:
    """Build, load and wrap the model that ``config`` names; the process groups must exist.

    Raises:
        ModelError: the model folder is missing, damaged or of an unknown architecture.
        ConfigError: the layout does not fit the model.
    """
    train, parallel = config.train, config.parallel
    spec, source = read_spec(config.model.path), resolve_folder(config.model.path)
    chunks = build_model(spec, config, device)
    if config.model.weights is None:
        load_hf_weights(chunks, spec, source)
    else:
        load_weights(chunks, config.model.weights)

    replay, route_shape = None, None
    if train.routing_replay != "off" and spec.moe:
        layers = [layer + 1 for layer in spec.moe_layers]
        replay = RoutingReplay(chunks, layers, recompute=train.recompute == "full")
        if train.routing_replay == "rollout":
            route_shape = RouteShape(replay.columns, spec.top_k, spec.experts)
    context = ContextGroup(parallel_state.get_context_parallel_group()) if parallel.cp > 1 else None
    settings = LogprobSettings(
        vocab_size=spec.vocab,
        temperature=config.rollout.temperature,
        mode=train.logprob_mode,
        chunk_tokens=train.logprob_chunk_tokens,
        group=parallel_state.get_tensor_model_parallel_group(),
    )
    ddp_chunks = wrap_for_training(chunks, parallel)
    optimizer = make_optimizer(ddp_chunks, config.optimizer, parallel, getattr(torch, config.model.dtype))
    rates, updates = config.optimizer, train.num_updates
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=rates.lr,
        min_lr=rates.lr * rates.min_lr_ratio,
        lr_warmup_steps=min(int(rates.warmup_fraction * updates), updates - 1),
        lr_decay_steps=updates,
        lr_decay_style=rates.schedule,
        start_wd=rates.weight_decay,
        end_wd=rates.weight_decay,
        wd_incr_steps=updates,
        wd_incr_style="constant",
    )
    step = TrainStep(
        chunks=ddp_chunks,
        optimizer=optimizer,
        schedule=schedule,
        objective=Objective(config.algorithm, context),
        head=LogprobHead(settings),
        replay=replay,
    )
    split = uses_sequence_parallel(spec, parallel)
    layout = BatchLayout(
        packed=train.max_tokens_per_micro_batch is not None,
        sequence_rank=parallel_state.get_tensor_model_parallel_rank() if split else 0,
        sequence_size=parallel.tp if split else 1,
        context_rank=parallel_state.get_context_parallel_rank(),
        context_size=parallel.cp,
    )
    return Policy(spec, source, chunks, step, route_shape, layout)


def wrap_for_training(chunks: Sequence[torch.nn.Module], parallel: ParallelConfig) -> list[DistributedDataParallel]:
    """Wrap model chunks in Megatron's DDP: float32 gradient buffers, averaged over DP x CP."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.distributed_optimizer,
        average_in_collective=False,
    )
    return [DistributedDataParallel(chunk.config, ddp_config, chunk) for chunk in chunks]


def make_optimizer(
    ddp_chunks: Sequence[DistributedDataParallel], config: OptimizerConfig, parallel: ParallelConfig, dtype: torch.dtype
) -> MegatronOptimizer:
    """Build AdamW without weight decay of norms and biases, and set the hooks of Megatron's schedules."""
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.lr * config.min_lr_ratio,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=parallel.distributed_optimizer,
        ),
        list(ddp_chunks),
    )
    for chunk in ddp_chunks:
        chunk.config.grad_scale_func = optimizer.scale_loss
        chunk.config.finalize_model_grads_func = finalize_model_grads
    return optimizer
