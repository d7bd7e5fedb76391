"""What a transport and a publisher are built from, in tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron_fr.config.sections import SyncConfig
from megatron_fr.hf.export import hf_tensor_specs
from megatron_fr.hf.folder import read_spec
from megatron_fr.weight_sync.engines import EngineCalls
from megatron_fr.weight_sync.transport import TransportContext


def make_context(
    model: Path, output: Path, *engines: str, bucket_bytes: int = 100_000, **sync: Any
) -> TransportContext:
    """Of the given engines; with the default buckets, q, k and v, and the experts' gate and up, are sent apart."""
    config = SyncConfig(**sync).model_copy(update={"bucket_mb": bucket_bytes / 2**20})
    return TransportContext(
        engines=EngineCalls(engines, config.timeout_s),
        shapes={spec.name: spec.shape for spec in hf_tensor_specs(read_spec(model), torch.float32)},
        config=config,
        engine_tp=1,
        backend="gloo",
        host="127.0.0.1",
        model_folder=model,
        output=output,
    )


def weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """In the order of a push, in which tensors that the engine loads as one follow each other."""
    tensors = load_file(folder / "model.safetensors")
    for spec in hf_tensor_specs(read_spec(folder), torch.float32):
        yield spec.name, tensors[spec.name]


class Draining:
    """A transport to nowhere; it reads what it is given."""

    def __init__(self, context: TransportContext) -> None:
        self.seen: list[str] = []

    def connect(self) -> None:
        """Nothing to do."""

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Read all."""
        self.seen += [name for name, _ in tensors]

    def close(self) -> None:
        """Nothing to do."""


class Failing(Draining):
    """One that raises what is no error of this project."""

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        raise OSError("the link is down")
