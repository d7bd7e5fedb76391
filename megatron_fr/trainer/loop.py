"""The trainer's main loop: lease, update, sync, commit, until all updates are done or someone asks it to stop.

With a checkpoint to go on from, it starts where that was saved; the first thing is then one forced push of its weights.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_fr.checkpoint.store import read_record, set_aside
from megatron_fr.checkpoint.training import TrainingCheckpoints
from megatron_fr.config import RunConfig
from megatron_fr.errors import CheckpointError, MegatronFRError, RolloutEnded, SyncError, UpdateError
from megatron_fr.observe.metrics import MetricsWriter
from megatron_fr.observe.progress import Progress
from megatron_fr.runtime.device import Device
from megatron_fr.trainer.data.client import RolloutClient
from megatron_fr.trainer.data.loader import Batch, BatchFeed, Shutdown, from_rank_zero
from megatron_fr.trainer.distributed import RankInfo
from megatron_fr.trainer.policy import Policy, build_policy
from megatron_fr.trainer.step import StepReport
from megatron_fr.trainer.weight_push import SyncMetrics, WeightSync


class StopRequest:
    """Remembers SIGTERM and SIGINT; only rank 0's memory counts, the others learn it with the next batch."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, *_: Any) -> None:
        self.asked = True

    def __bool__(self) -> bool:
        return self.asked


class TrainerLoop:
    """One per rank; the process groups must exist.

    Args:
        service_url: of the rollout service.
        resume: the checkpoint to go on from; the service was restored from the same one.

    Raises:
        MegatronFRError: the model cannot be built, the checkpoint does not fit, or the engines cannot be reached.
    """

    def __init__(
        self,
        config: RunConfig,
        device: Device,
        info: RankInfo,
        service_url: str,
        stop: StopRequest,
        resume: Path | None = None,
    ) -> None:
        self._config = config
        self._stop = stop
        self._policy: Policy = build_policy(config, device)
        self._client = RolloutClient(service_url)
        self._feed = BatchFeed.of(config, self._policy, self._client, device.torch_device)
        # Engines on other machines need an address that they can reach; on one machine the loopback is enough.
        host = config.rollout.host if info.master_addr in ("127.0.0.1", "localhost") else socket.gethostname()
        self._sync = WeightSync(config, device, self._policy, self._feed, self._client, host)
        self._first_rank = dist.get_rank() == 0
        self._update = 0
        self._version = 0
        self._saved_hf = -1
        self._score: float | None = None
        self._checkpoints = TrainingCheckpoints(config, self._policy, self._client.state)
        if resume is not None:
            self._go_on_from(resume)
        else:
            self._start_anew()

    def run(self) -> Path:
        """Train to the end, or until asked to stop.

        Returns:
            the Hugging Face folder of the last weights.

        Raises:
            CheckpointError: a checkpoint could not be written.
            RolloutEnded, SyncError: rollouts or engines failed for good; the weights so far were saved first.
            UpdateError: a batch gave values that are not finite; the weights before it were saved first.
        """
        config = self._config
        if config.checkpoint.every == 0 and self._first_rank:
            print("checkpoint.every=0: if this run is killed, the same command begins again", flush=True)
        writer = MetricsWriter(config.output) if self._first_rank else None
        progress = Progress(config.train.num_updates)

        def record(row: Mapping[str, float]) -> None:
            if writer is not None:
                progress.update(writer.write(row))

        try:
            # A forced first push: from here on engines and trainer agree, whatever the engines loaded.
            first = self._sync.push(self._version)
            from_rank_zero(lambda: self._client.start(self._version))
            if self._update == 0:
                record({"update": 0, "version": 0, **_sync_row(first), **self._evaluate("start")})
            while self._update < config.train.num_updates:
                row = self._one_update()
                try:
                    row |= self._evaluate_where_due()
                finally:  # an interrupted evaluation does not cost the update's own metrics
                    record(row)
                self._checkpoints.poll()
                if self._due(config.checkpoint.every):
                    self._checkpoints.begin(update=self._update, version=self._version, score=self._score)
                if self._due(config.checkpoint.hf_every):
                    self.save_hf()
            self._sync.finish_probe()  # the last version's
        except Shutdown:
            if self._first_rank:
                print(f"asked to stop after update {self._update}: saving a checkpoint", flush=True)
        except (RolloutEnded, SyncError, UpdateError, CheckpointError):  # raised on every rank alike
            self._rescue()
            raise
        finally:
            if writer is not None:
                writer.close()
        try:
            # The Hugging Face folder is written while the checkpoint's files are on their way to the disk.
            self._checkpoints.begin(update=self._update, version=self._version, score=self._score)
        except (RolloutEnded, CheckpointError):
            self._rescue()
            raise
        folder = self.save_hf()
        self._checkpoints.finish()
        return folder

    def save_hf(self) -> Path:
        """Write the current weights as a Hugging Face folder, unless this process has done so already.

        A folder that is there may hold other weights: of an earlier run, or of the same update before it was repeated.
        """
        folder = self._config.output / "checkpoints" / f"update-{self._update:06d}"
        if self._saved_hf != self._update:
            self._policy.save_hf(folder)
            self._saved_hf = self._update
        return folder

    def close(self) -> None:
        """Leave the update group and drop the connections."""
        self._sync.close()
        self._client.close()

    def _rescue(self) -> None:
        """Keep what a failed run has: the checkpoint that is being written, and the last weights.

        No new training checkpoint: the service may be gone, and with it what that needs of it. What cannot be saved is
        said, so that the failure's own error stays the last word.
        """
        said = []
        try:
            if (newest := self._checkpoints.finish()) is not None:
                said.append(f"the newest training checkpoint is {newest}")
        except MegatronFRError as error:
            said.append(f"the training checkpoint could not be saved: {error}")
        try:
            if self._update:
                said.append(f"saved the weights of update {self._update} in {self.save_hf()}")
        except MegatronFRError as error:
            said.append(f"the weights of update {self._update} could not be saved: {error}")
        if self._first_rank:
            print("\n".join(said), flush=True)

    def _due(self, every: int) -> bool:
        return every > 0 and self._update % every == 0

    def _start_anew(self) -> None:
        # Before anything is touched: a service that has gone on belongs to a run that has checkpoints.
        status = from_rank_zero(self._client.status)
        if (status["version"], status["consumed_batches"]) != (0, 0):
            raise CheckpointError(
                f"the trainer starts anew, but the rollout service stands at update {status['consumed_batches']}, "
                f"version {status['version']}: restart it too, or go on from its checkpoint"
            )
        old = from_rank_zero(lambda: set_aside(self._config.output))
        if old is not None and self._first_rank:
            print(f"starting anew; training checkpoints of an earlier run were renamed to {old}", flush=True)

    def _go_on_from(self, folder: Path) -> None:
        # Compared first: to load the model and the optimizer takes minutes.
        record = from_rank_zero(lambda: read_record(folder))
        status = from_rank_zero(self._client.status)
        if (status["version"], status["consumed_batches"]) != (record.version, record.update):
            raise CheckpointError(
                f"checkpoint {folder} is of update {record.update}, version {record.version}; the rollout service "
                f"stands at update {status['consumed_batches']}, version {status['version']}: restore it from the same "
                "one"
            )
        self._checkpoints.load(folder)
        self._update, self._version, self._score = record.update, record.version, record.score
        self._checkpoints.set_newer_aside()
        if self._first_rank:
            print(f"going on after update {self._update} from {folder}", flush=True)

    def _one_update(self) -> dict[str, float]:
        started = time.monotonic()
        batch = self._feed.next(self._version, lambda: bool(self._stop))
        probe = self._sync.finish_probe()  # before the step: these are still the weights that it is of
        report = self._train(batch)
        self._update += 1  # from here on these are the weights, whatever becomes of their sync
        sync: SyncMetrics | None = None
        if report.stepped:
            self._score = None  # that was the old weights'
            self._version += 1
            sync = self._sync.push(self._version)
        batch_id, version, stepped = batch.lease.batch_id, self._version, report.stepped
        from_rank_zero(lambda: self._client.commit(batch_id, version=version, stepped=stepped))
        seconds = time.monotonic() - started
        return {
            "update": self._update,
            "version": self._version,
            **batch.lease.metrics,
            **report.metrics,
            **_sync_row(sync),
            **probe,
            "train/stepped": float(report.stepped),
            "train/tokens_per_s": batch.num_tokens / seconds,
            "time/wait": batch.wait_s,
            "time/forward_backward": report.forward_backward_s,
            "time/optimizer": report.optimizer_s,
            "time/sync": sync.seconds if sync else 0.0,
            "time/probe": probe.get("time/probe", 0.0),
            "time/update": seconds,
            "time/trainer_idle": batch.wait_s / seconds,
        }

    def _train(self, batch: Batch) -> StepReport:
        if not batch.signal and self._config.train.skip_without_signal:
            self._policy.step.skip()
            return StepReport({}, 0.0, 0.0, stepped=False)
        every = self._config.train.replay_check_every
        check = every > 0 and (self._update + 1) % every == 0
        return self._policy.step.update(batch.micro_batches, batch.constants, check_replay=check)

    def _evaluate_where_due(self) -> dict[str, float]:
        last = self._update == self._config.train.num_updates
        return self._evaluate(f"update-{self._update}") if last or self._due(self._config.evaluation.every) else {}

    def _evaluate(self, name: str) -> dict[str, float]:
        """Held-out metrics.

        Raises:
            Shutdown: asked to stop meanwhile.
        """
        if self._config.data.eval is None:
            return {}
        # In a thread and looked after in short turns: a stop request must not wait for the evaluation's end, nor may a
        # collective of the other ranks.
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="evaluation")
        try:
            pending = thread.submit(self._client.evaluate, name) if self._first_rank else None
            metrics: dict[str, float] | None = None
            while metrics is None:
                stop, metrics = from_rank_zero(lambda: self._look_after(pending))
                if stop:
                    raise Shutdown
        finally:
            thread.shutdown(wait=False)
        self._score = metrics.get("reward", self._score)
        return {f"eval/{key}": value for key, value in metrics.items()}

    def _look_after(self, pending: Future[dict[str, float]] | None) -> tuple[bool, dict[str, float] | None]:
        """Whether to stop, and the evaluation's metrics once it is through; on rank 0."""
        assert pending is not None
        deadline = time.monotonic() + 1.0
        while not self._stop and time.monotonic() < deadline:
            try:
                return False, pending.result(timeout=0.2)
            except TimeoutError:
                continue
        return bool(self._stop), None


def _sync_row(sync: SyncMetrics | None) -> dict[str, float]:
    if sync is None:
        return {}
    row = {"sync/seconds": sync.seconds, "sync/verify_s": sync.verify_s, "sync/bytes": float(sync.num_bytes)}
    if sync.probe_difference is not None:
        row["sync/probe_logprob_diff"] = sync.probe_difference
    return row
