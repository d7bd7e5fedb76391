"""From a run's configuration to the parts of the rollout service. Nothing here starts a process."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from megatron_fr.config import RunConfig
from megatron_fr.engines.engine import EngineSpec
from megatron_fr.errors import ConfigError, ModelError
from megatron_fr.models.spec import ModelSpec
from megatron_fr.runtime.device import Device
from megatron_fr.trajectory import ModelLimits

_ANY_ADDRESS = ("0.0.0.0", "::", "")
#: Of an engine, above its share: for the probe after a sync, and for requests given up here that still run there.
_SPARE_SLOTS = 4


def load_tokenizer(path: str) -> Any:
    """The policy's tokenizer.

    Raises:
        ModelError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"model.path={path!r} has no usable tokenizer: {reason}") from error


def model_limits(spec: ModelSpec, max_context: int) -> ModelLimits:
    """What trajectories of this model may contain.

    Raises:
        ModelError: the engine cannot serve it.
    """
    if spec.unserved is not None:
        raise ModelError(f"model.path is a model to convert but not to sample from: {spec.unserved}")
    return ModelLimits(
        vocab_size=spec.vocab,
        max_context=max_context,
        num_moe_layers=len(spec.moe_layers),
        top_k=spec.top_k,
        num_experts=spec.experts,
        dense_layers=tuple(n for n in range(spec.layers) if n not in spec.moe_layers) if spec.moe else (),
    )


def wants_routes(config: RunConfig, limits: ModelLimits) -> bool:
    """Routes are asked for when the trainer replays them; dense models have none."""
    return config.train.routing_replay == "rollout" and limits.num_moe_layers > 0


def engine_specs(config: RunConfig, device: Device, limits: ModelLimits) -> list[EngineSpec]:
    """One specification an engine; their logs go to ``output/logs``.

    Raises:
        ConfigError: there are fewer GPUs than the engines need.
    """
    rollout = config.rollout
    if device.kind == "cuda":
        import torch

        needed, visible = rollout.engines * rollout.engine_tp, torch.cuda.device_count()
        if needed > visible:
            raise ConfigError(
                f"rollout.engines={rollout.engines} x rollout.engine_tp={rollout.engine_tp} need {needed} "
                f"GPUs, {visible} are visible; start fewer engines, or show the rollout service more GPUs"
            )
    # An evaluation has as many trajectories under way as the runners, beside them.
    beside = 2 if config.evaluation_sets else 1
    share = -(-beside * rollout.max_concurrent_trajectories // rollout.engines)
    return [
        EngineSpec(
            model_path=config.model.path,
            log_path=Path(config.output) / "logs" / f"engine-{index}.log",
            device=device.kind,
            dtype=config.model.dtype,
            host=rollout.host,
            port=rollout.engine_port + index if rollout.engine_port else 0,
            index=index,
            tensor=rollout.engine_tp,
            max_context=rollout.max_context,
            max_running=max(64, share + _SPARE_SLOTS),
            return_routes=wants_routes(config, limits),
            seed=config.seed + index,
            start_timeout_s=rollout.start_timeout_s,
            args=rollout.engine_args,
        )
        for index in range(rollout.engines)
    ]


def advertised_host(host: str) -> str:
    """The address that others reach a server under which is bound to ``host``."""
    return socket.gethostname() if host in _ANY_ADDRESS else host
