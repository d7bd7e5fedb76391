"""Settings that must not change between a training checkpoint and the run that goes on from it. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_fr.checkpoint.store import RunRecord, read_record
from megatron_fr.config import RunConfig
from megatron_fr.errors import CheckpointError


def run_settings(config: RunConfig) -> dict[str, Any]:
    """Settings of the configuration that decide the tensors' meaning, the tokens, and what the counters count."""
    return {
        "model.dtype": config.model.dtype,
        "algorithm.name": config.algorithm.name,
        "algorithm.group_size": config.algorithm.group_size,
        "train.batch_size": config.train.batch_size,
        "rollout.temperature": config.rollout.temperature,  # waiting trajectories were sampled at it
    }


def model_settings(identity: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Settings of the model in ``source``, whose ``ModelSpec.identity()`` is given."""
    tokenizer = source / "tokenizer.json"
    return {
        **{f"model.{name}": value for name, value in identity.items()},
        "model.tokenizer.json": hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else None,
    }


def check_unchanged(folder: Path, settings: Mapping[str, Any]) -> RunRecord:
    """Compare with the checkpoint in ``folder``; what an older version did not save is not compared.

    Raises:
        CheckpointError: a setting differs, or the checkpoint's record cannot be read.
    """
    record = read_record(folder)
    changes = [
        f"{name}: {record.fixed[name]!r} then, {value!r} now"
        for name, value in settings.items()
        if record.fixed.get(name, value) != value
    ]
    if changes:
        raise CheckpointError(
            f"checkpoint {folder} is of another run ({'; '.join(changes)}); undo the change, choose another output "
            "folder, or start anew with checkpoint.resume=never"
        )
    return record
