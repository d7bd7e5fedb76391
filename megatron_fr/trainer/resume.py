"""Where a run begins: at a training checkpoint, or anew."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from megatron_fr.checkpoint.store import read_record, set_aside
from megatron_fr.checkpoint.training import TrainingCheckpoints
from megatron_fr.errors import CheckpointError
from megatron_fr.runtime.collectives import from_rank_zero
from megatron_fr.trainer.data.client import RolloutClient
from megatron_fr.trainer.loop import RunPosition


def begin_anew(output: Path, client: RolloutClient) -> RunPosition:
    """Rename training checkpoints of an earlier run in ``output``; a collective.

    Raises:
        CheckpointError: the service has gone on already, so it belongs to another run. Nothing was touched.
    """
    status = from_rank_zero(client.status)
    if (status["version"], status["consumed_batches"]) != (0, 0):
        raise CheckpointError(
            f"the trainer starts anew, but the rollout service stands at update {status['consumed_batches']}, "
            f"version {status['version']}: restart it too, or go on from its checkpoint"
        )
    old = from_rank_zero(lambda: set_aside(output))
    if old is not None and dist.get_rank() == 0:
        print(f"starting anew; training checkpoints of an earlier run were renamed to {old}", flush=True)
    return RunPosition()


def go_on_from(folder: Path, client: RolloutClient, checkpoints: TrainingCheckpoints) -> RunPosition:
    """Load the checkpoint in ``folder``; a collective.

    Raises:
        CheckpointError: it does not fit this run, or the service was restored from another one.
    """
    # Compared first: to load the model and the optimizer takes minutes.
    record = from_rank_zero(lambda: read_record(folder))
    status = from_rank_zero(client.status)
    if (status["version"], status["consumed_batches"]) != (record.version, record.update):
        raise CheckpointError(
            f"checkpoint {folder} is of update {record.update}, version {record.version}; the rollout service "
            f"stands at update {status['consumed_batches']}, version {status['version']}: restore it from the same one"
        )
    checkpoints.load(folder)
    checkpoints.set_newer_aside()
    if dist.get_rank() == 0:
        print(f"going on after update {record.update} from {folder}", flush=True)
    return RunPosition(record.update, record.version, record.score)
