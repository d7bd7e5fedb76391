"""The weights of a live model, without optimizer, as a Megatron torch_dist checkpoint; any layout loads any other's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_fr.checkpoint.state import model_state
from megatron_fr.errors import ModelError


def save_weights(chunks: Sequence[torch.nn.Module], folder: str | Path) -> None:
    """Write the weights to the existing, empty ``folder``. A collective.

    The writer starts processes: a script that calls this needs ``if __name__ == "__main__"``.
    """
    dist_checkpointing.save(model_state(chunks), str(folder))


@torch.no_grad()
def load_weights(chunks: Sequence[torch.nn.Module], folder: str | Path) -> None:
    """Fill this rank's parameters from a checkpoint of any layout. A collective.

    Raises:
        ModelError: the checkpoint does not hold this model's weights.
    """
    state = {name: _tensors(chunk) for name, chunk in model_state(chunks).items()}
    try:
        loaded = dist_checkpointing.load(state, str(folder))
    except Exception as error:
        raise ModelError(f"checkpoint {folder} does not hold this model's weights: {error}") from error
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"chunk{i}"], strict=False)  # extra states of layers are not weights


def _tensors(state: dict[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in state.items() if not isinstance(entry, ShardedObject)}
