"""The policy and everything that updates it, assembled from the run's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state

from megatron_fr.checkpoint.io import load_weights
from megatron_fr.config import RunConfig
from megatron_fr.hf.export import iter_hf_tensors
from megatron_fr.hf.folder import read_spec, resolve_folder
from megatron_fr.hf.model import load_hf_weights, save_hf_folder
from megatron_fr.models.layouts import uses_sequence_parallel
from megatron_fr.models.spec import ModelSpec
from megatron_fr.runtime.device import Device
from megatron_fr.trainer.data.batch import BatchLayout, RouteShape
from megatron_fr.trainer.data.context import ContextGroup
from megatron_fr.trainer.head import LogprobHead
from megatron_fr.trainer.logprob import LogprobSettings
from megatron_fr.trainer.model import build_model, torch_dtype
from megatron_fr.trainer.objective import Objective
from megatron_fr.trainer.optimizer import make_optimizer, make_schedule, wrap_for_training
from megatron_fr.trainer.routing_replay import RoutingReplay
from megatron_fr.trainer.step import TrainStep


@dataclass
class Policy:
    """One rank's share of the model, and its update.

    Attributes:
        spec: of its model.
        chunks: the bare Megatron-Core model chunks.
        route_shape: of the routes to replay; None where nothing is replayed.
        layout: how this rank sees a micro-batch.
    """

    spec: ModelSpec
    source: Path
    chunks: Sequence[torch.nn.Module]
    step: TrainStep
    objective: Objective
    route_shape: RouteShape | None
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
    spec = read_spec(config.model.path)
    source = resolve_folder(config.model.path)
    chunks = build_model(spec, config, device)
    if config.model.weights is None:
        load_hf_weights(chunks, spec, source)
    else:
        load_weights(chunks, config.model.weights)

    replay, route_shape = None, None
    if config.train.routing_replay != "off" and spec.moe:
        layers = [layer + 1 for layer in spec.moe_layers]
        replay = RoutingReplay(chunks, layers, recompute=config.train.recompute == "full")
        if config.train.routing_replay == "rollout":
            route_shape = RouteShape(replay.columns, spec.top_k, spec.experts)
    context = ContextGroup(parallel_state.get_context_parallel_group()) if config.parallel.cp > 1 else None
    ddp_chunks = wrap_for_training(chunks, config.parallel)
    optimizer = make_optimizer(ddp_chunks, config.optimizer, config.parallel, torch_dtype(config.model.dtype))
    step = TrainStep(
        chunks=ddp_chunks,
        optimizer=optimizer,
        schedule=make_schedule(optimizer, config.optimizer, config.train.num_updates),
        objective=Objective(config.algorithm, context),
        head=LogprobHead(
            LogprobSettings(
                vocab_size=spec.vocab,
                temperature=config.rollout.temperature,
                mode=config.train.logprob_mode,
                chunk_tokens=config.train.logprob_chunk_tokens,
                group=parallel_state.get_tensor_model_parallel_group(),
            )
        ),
        replay=replay,
    )
    return Policy(
        spec=spec,
        source=source,
        chunks=chunks,
        step=step,
        objective=step.objective,
        route_shape=route_shape,
        layout=_layout(config, sequence_parallel=uses_sequence_parallel(spec, config.parallel)),
    )


def _layout(config: RunConfig, *, sequence_parallel: bool) -> BatchLayout:
    return BatchLayout(
        packed=config.train.max_tokens_per_micro_batch is not None,
        sequence_rank=parallel_state.get_tensor_model_parallel_rank() if sequence_parallel else 0,
        sequence_size=config.parallel.tp if sequence_parallel else 1,
        context_rank=parallel_state.get_context_parallel_rank(),
        context_size=config.parallel.cp,
    )
