"""The one switch between CPU and GPU code: :class:`Device`."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_fr.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """Device of one rank, and what depends on it."""

    kind: Literal["cpu", "cuda"]
    torch_device: torch.device

    @property
    def collective_backend(self) -> Literal["nccl", "gloo"]:
        return "nccl" if self.kind == "cuda" else "gloo"

    def transformer_impl(self, setting: Literal["auto", "te", "local"]) -> Literal["te", "local"]:
        """Resolve ``model.transformer_impl``: Transformer Engine on GPUs, Megatron's local layers on CPUs.

        Raises:
            ConfigError: the setting means Transformer Engine, which cannot be used here.
        """
        if setting == "local" or (setting == "auto" and self.kind == "cpu"):
            return "local"
        if self.kind == "cpu":
            raise ConfigError("model.transformer_impl='te' needs a GPU; set model.transformer_impl=auto or local")
        if importlib.util.find_spec("transformer_engine") is None:
            raise ConfigError(
                f"model.transformer_impl={setting!r} needs Transformer Engine, which is not installed; install "
                "transformer-engine[pytorch], or set model.transformer_impl=local (slower)"
            )
        return "te"


def resolve_device(setting: Literal["auto", "cpu", "cuda"]) -> Device:
    """Choose this rank's device from the configuration's ``device``; ``LOCAL_RANK`` numbers its GPU.

    Raises:
        ConfigError: there is no GPU, or none for this rank.
    """
    if setting == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda', but torch finds no usable GPU; set device=auto or device=cpu")
    if setting == "cpu" or not torch.cuda.is_available():
        return Device("cpu", torch.device("cpu"))
    rank, visible = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))), torch.cuda.device_count()
    if visible == 1:  # the launcher shows each rank only its own GPU
        rank = 0
    if rank >= visible:
        raise ConfigError(f"device={setting!r}: local rank {rank} has no GPU, {visible} are visible; start fewer ranks")
    return Device("cuda", torch.device("cuda", rank))


def hide_gpu_packages() -> None:
    """Hide flashinfer, which imports slowly, and flash_mla, which without a driver ends Megatron-Core's import."""
    for name in ("flash_mla", "flashinfer"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def prepare_process(device: Device) -> None:
    """Prepare the process for its first ``import megatron.core``; a second call is harmless.

    Raises:
        ConfigError: the device is the CPU, but Megatron-Core would use a GPU that torch sees.
    """
    if device.kind == "cuda":
        torch.cuda.set_device(device.torch_device)
        return
    if torch.cuda.is_available():
        raise ConfigError("device='cpu' on a machine with GPUs: hide them, start with CUDA_VISIBLE_DEVICES='' (empty)")
    hide_gpu_packages()
    # Compiling Megatron-Core's small functions costs more time on a CPU than it saves.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if "torch._dynamo.config" in sys.modules:  # imported earlier, so the variable comes too late
        setattr(sys.modules["torch._dynamo.config"], "disable", True)  # noqa: B010


def split_gpus(visible: list[str], *, trainer_ranks: int, engine_gpus: int) -> tuple[list[str], list[str]]:
    """Give the first of the machine's GPUs to trainer ranks and the next ones to engines.

    Raises:
        ConfigError: there are too few GPUs.
    """
    needed = trainer_ranks + engine_gpus
    if needed > len(visible):
        raise ConfigError(
            f"parallel.world_size={trainer_ranks} trainer ranks and rollout.engines x rollout.engine_tp = "
            f"{engine_gpus} need {needed} GPUs on this machine, {len(visible)} are visible; lower one of them, or "
            "start trainer and rollout service on machines of their own"
        )
    return visible[:trainer_ranks], visible[trainer_ranks:needed]


def visible_gpus() -> list[str]:
    """GPUs of this process, named as in ``CUDA_VISIBLE_DEVICES``."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(index) for index in range(torch.cuda.device_count())]
