"""How a version's tensors travel from trainer rank 0 to the engines: the interface, and the choice by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch

from megatron_fr.config.sections import SyncConfig
from megatron_fr.runtime.importing import import_object
from megatron_fr.weight_sync.engines import EngineCalls

_BUILT_IN = {
    "broadcast": "megatron_fr.weight_sync.broadcast:BroadcastTransport",
    "disk": "megatron_fr.weight_sync.disk:DiskTransport",
}


@dataclass(frozen=True)
class TransportContext:
    """What a transport is built from."""

    engines: EngineCalls  #: addresses and HTTP interface of the engines
    shapes: Mapping[str, tuple[int, ...]]  #: shapes of a push's tensors by Hugging Face name, in their order
    config: SyncConfig  #: the section ``sync``; ``transport_args`` are the transport's own options
    engine_tp: int  #: ranks of one engine
    backend: str  #: "nccl" or "gloo", for a process group with the engines
    host: str  #: this machine's address as the engines reach it
    model_folder: Path  #: the Hugging Face folder that the model came from
    output: Path  #: the run's folder


class Transport(Protocol):
    """Brings tensors to all engines. Built on trainer rank 0 with a :class:`TransportContext`.

    Generations are paused in place while :meth:`publish` runs. An exception ends the run; raise
    :class:`~megatron_fr.errors.SyncError` with the engine and a remedy.
    """

    def connect(self) -> None:
        """Prepare, or raise SyncError; called once, before the first :meth:`publish`."""

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load the tensors into every engine and label its weights ``version`` last, when all have arrived.

        Args:
            tensors: Hugging Face names and whole tensors on the trainer's device, to be read once. They may share
                memory with the model: do not write to them. The iterator raises SyncError, before its end, where they
                are not the model's.
        """

    def close(self) -> None:
        """Leave the engines; called once, also after a failure."""


def make_transport(context: TransportContext) -> Transport:
    """Build the transport that ``sync.transport`` names, or raise ConfigError where it cannot be imported."""
    name = context.config.transport
    return cast(Transport, import_object(_BUILT_IN.get(name, name), "sync.transport")(context))
