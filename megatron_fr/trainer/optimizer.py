"""Megatron-Core's gradient buffers, AdamW and learning-rate schedule, made from the run's configuration."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_fr.config import OptimizerConfig, ParallelConfig


def wrap_for_training(
    chunks: Sequence[torch.nn.Module], parallel: ParallelConfig, *, overlap_grad_reduce: bool = False
) -> list[DistributedDataParallel]:
    """Wrap model chunks in Megatron's DDP: float32 gradient buffers, averaged over DP x CP."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap_grad_reduce,
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


def make_schedule(optimizer: MegatronOptimizer, config: OptimizerConfig, num_updates: int) -> OptimizerParamScheduler:
    """Warm up, then decay to ``lr * min_lr_ratio`` at ``num_updates``; step it before each update."""
    warmup = min(int(config.warmup_fraction * num_updates), num_updates - 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.lr * config.min_lr_ratio,
        lr_warmup_steps=warmup,
        lr_decay_steps=num_updates,
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=num_updates,
        wd_incr_style="constant",
    )
