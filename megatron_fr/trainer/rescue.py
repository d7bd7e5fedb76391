"""The end of a run: its weights and its checkpoint are saved, however it ends."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from megatron_fr.errors import CheckpointError, MegatronFRError, RolloutEnded, SyncError, UpdateError
from megatron_fr.trainer.loop import TrainerLoop
from megatron_fr.trainer.stop import Shutdown


def run_and_save(loop: TrainerLoop) -> Path:
    """Run the loop to its end or to a stop request, then save a checkpoint and the weights.

    Returns:
        the Hugging Face folder of the last weights.

    Raises:
        CheckpointError: a checkpoint could not be written; the weights were saved all the same.
        RolloutEnded, SyncError: rollouts or engines failed for good; the weights so far were saved first.
        UpdateError: a batch gave values that are not finite; the weights before it were saved first.
    """
    position = loop.position
    try:
        try:
            loop.run()
        except Shutdown:
            _say(f"asked to stop after update {position.update}: saving a checkpoint")
        loop.checkpoints.begin(update=position.update, version=position.version, score=position.score)
    except (RolloutEnded, SyncError, UpdateError, CheckpointError):  # raised on every rank alike
        _rescue(loop)
        raise
    # The Hugging Face folder is written while the checkpoint's files are on their way to the disk.
    folder = loop.export.save(position.update)
    loop.checkpoints.finish()
    return folder


def _rescue(loop: TrainerLoop) -> None:
    """Complete the checkpoint that is being written, and save the last weights.

    No new training checkpoint: it needs the service, which may be gone. What cannot be saved is only said, so that the
    failure's own error stays the last word.
    """
    update = loop.position.update
    said = []
    try:
        if (newest := loop.checkpoints.finish()) is not None:
            said.append(f"the newest training checkpoint is {newest}")
    except MegatronFRError as error:
        said.append(f"the training checkpoint could not be saved: {error}")
    try:
        if update:
            said.append(f"saved the weights of update {update} in {loop.export.save(update)}")
    except MegatronFRError as error:
        said.append(f"the weights of update {update} could not be saved: {error}")
    _say("\n".join(said))


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)
