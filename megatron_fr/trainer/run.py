"""One rank's run: it begins anew or at a training checkpoint, and its last weights are saved however it ends."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path

import torch.distributed as dist

from megatron_fr.checkpoint.store import read_record, set_aside
from megatron_fr.checkpoint.training import TrainingCheckpoints
from megatron_fr.config import RunConfig, save_config
from megatron_fr.errors import CheckpointError, MegatronFRError
from megatron_fr.observe.metrics import MetricsWriter
from megatron_fr.observe.progress import Progress
from megatron_fr.runtime.access import read_token
from megatron_fr.runtime.collectives import from_rank_zero, waiting_for
from megatron_fr.runtime.device import Device
from megatron_fr.trainer.data.client import RolloutClient
from megatron_fr.trainer.data.loader import BatchLoader, Shutdown
from megatron_fr.trainer.distributed import RankInfo
from megatron_fr.trainer.evaluation import run_evaluation
from megatron_fr.trainer.loop import RunPosition, TrainerLoop
from megatron_fr.trainer.policy import build_policy
from megatron_fr.trainer.weight_push import WeightSync


def train(
    config: RunConfig, device: Device, info: RankInfo, service_url: str, stop: object, resume: Path | None
) -> Path:
    """Build this rank's trainer and run it to its end; the Hugging Face folder of the last weights.

    ``stop`` is true on rank 0 once the run is asked to stop. ``resume`` is the checkpoint from which the service was
    restored too, None to start anew.

    Raises:
        MegatronFRError: the trainer cannot be built, or see :func:`run_and_save`.
    """
    with waiting_for("the model to be built and its weights to be read"):
        policy = build_policy(config, device)
    client = RolloutClient(service_url, read_token(config.output))
    checkpoints = TrainingCheckpoints(config, policy, client.state)  # first: it refuses a second trainer in one output
    loader = BatchLoader(config, policy, client, device.torch_device, stop)
    # Engines on other machines need an address that they can reach; on one machine the loopback is enough.
    host = config.rollout.host if info.master_addr in ("127.0.0.1", "localhost") else socket.gethostname()
    sync = WeightSync(config, device, policy, loader, client, host)
    with waiting_for(f"checkpoint {resume} to be read"):
        position = begin_anew(config.output, client) if resume is None else go_on_from(resume, client, checkpoints)
    if config.checkpoint.every == 0:
        _say("checkpoint.every=0: if this run is killed, the same command begins again")
    with recorder(config, position.update + (resume is not None)) as record:
        loop = TrainerLoop(
            config=config,
            position=position,
            loader=loader,
            step=policy.step,
            sync=sync,
            evaluate=partial(run_evaluation, client, stop),
            checkpoints=checkpoints,
            export=weight_export(config.output, policy.save_hf),
            record=record,
        )
        folder = run_and_save(loop)
    sync.close()
    client.close()
    return folder


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
    if (old := from_rank_zero(lambda: set_aside(output))) is not None:
        _say(f"starting anew; training checkpoints of an earlier run were renamed to {old}")
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
    _say(f"going on after update {record.update} from {folder}")
    return RunPosition(record.update, record.version, record.score)


def weight_export(output: Path, write: Callable[[Path], None]) -> Callable[[int], Path]:
    """Make what writes the weights of an update once to ``output/checkpoints/update-N``."""

    @cache  # so a folder of an earlier run is replaced, and one of this run is not
    def export(update: int) -> Path:
        folder = output / "checkpoints" / f"update-{update:06d}"
        write(folder)
        return folder

    return export


@contextmanager
def recorder(config: RunConfig, first_update: int = 0) -> Iterator[Callable[[Mapping[str, float]], None]]:
    """Write the run's configuration; yield what takes each update's metrics, which rank 0 writes and prints.

    A collective, as each call is: every rank raises MegatronFRError where rank 0 cannot write.
    """
    progress = Progress(config.train.num_updates, folder=Path(config.output))
    with ExitStack() as stack:
        writer: list[MetricsWriter] = []

        def begin() -> None:
            writer.append(stack.enter_context(MetricsWriter(config.output, first_update)))
            save_config(config, config.output / "config.yaml")

        from_rank_zero(begin)
        yield lambda metrics: from_rank_zero(lambda: progress.update(writer[0].write(metrics)))


def run_and_save(loop: TrainerLoop) -> Path:
    """Run the loop to its end or to a stop request, then save a checkpoint and the weights; their folder.

    Raises:
        MegatronFRError: see :meth:`TrainerLoop.run`, or the record or a model could not be written. What can be saved
            was saved first, and what is lost was said.
    """
    position = loop.position
    try:
        try:
            loop.run()
        except Shutdown:
            _say(f"asked to stop after update {position.update}: saving a checkpoint")
        loop.checkpoints.begin(update=position.update, version=position.version, score=position.score)
    except MegatronFRError:  # raised on every rank alike
        _rescue(loop)
        raise
    # The Hugging Face folder is written while the checkpoint's files are on their way to the disk.
    with waiting_for("the weights and the last training checkpoint to be written"):
        folder = loop.export(position.update)
        loop.checkpoints.finish()
    return folder


def _rescue(loop: TrainerLoop) -> None:
    """Complete the checkpoint that is being written and save the last weights; only say what cannot be saved."""
    update = loop.position.update
    # No new training checkpoint: that needs the service, which may be gone.
    try:
        newest = loop.checkpoints.finish()
        there = newest is not None and newest.is_dir()  # not so where someone deleted the output
        _say(f"the newest training checkpoint is {newest}" if there else "there is no training checkpoint")
    except MegatronFRError as error:
        _say(f"the training checkpoint could not be saved: {error}")
    try:
        if update:
            _say(f"saved the weights of update {update} in {loop.export(update)}")
    except MegatronFRError as error:
        _say(f"the weights of update {update} are lost: they could not be saved: {error}")


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)
