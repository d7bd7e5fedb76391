"""The method: lease a batch, take one step on it, push the weights, commit the batch; then evaluate and checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_fr.checkpoint.training import TrainingCheckpoints
from megatron_fr.config import RunConfig
from megatron_fr.trainer.data.loader import Batch, BatchLoader
from megatron_fr.trainer.step import StepReport, TrainStep
from megatron_fr.trainer.weight_push import WeightSync


@dataclass
class RunPosition:
    """How far a run is; equal on every rank."""

    update: int = 0  # updates done
    version: int = 0  # of the weights; updates without a step do not raise it
    score: float | None = None  # held-out reward of these weights in the first set, None before they are evaluated


@dataclass(frozen=True)
class TrainerLoop:
    """One per rank; every method is a collective."""

    config: RunConfig
    position: RunPosition  # kept up to date
    loader: BatchLoader
    step: TrainStep
    sync: WeightSync
    evaluate: Callable[[str], dict[str, float]]  # metrics of the engines' weights, under the evaluation's name
    checkpoints: TrainingCheckpoints
    export: Callable[[int], Path]  # saves the weights of an update, once
    record: Callable[[Mapping[str, float]], None]

    def run(self) -> None:
        """Train until ``train.num_updates`` updates are done.

        Raises:
            Shutdown: asked to stop.
            CheckpointError: a checkpoint could not be written.
            RolloutEnded, SyncError: rollouts or engines failed for good.
            UpdateError: a batch gave values that are not finite.
        """
        config, position = self.config, self.position
        # From this push on engines and trainer agree, whatever the engines loaded.
        first = self.sync.push(position.version)
        self.loader.start(position.version)
        if position.update == 0:
            self.record({"update": 0, "version": 0, **first, **self._evaluate("start")})
        saving_s = 0.0
        while position.update < config.train.num_updates:
            metrics = self._update() | {"time/checkpoint": saving_s}
            last = position.update == config.train.num_updates
            try:
                if last or self._due(config.evaluation.every):
                    started = time.monotonic()
                    metrics |= self._evaluate(f"update-{position.update}")
                    metrics["time/evaluation"] = time.monotonic() - started
            finally:  # an interrupted evaluation does not cost the update's own metrics
                self.record(metrics)
            started = time.monotonic()
            self.checkpoints.finish(wait=False)
            if self._due(config.checkpoint.every):
                self.checkpoints.begin(update=position.update, version=position.version, score=position.score)
            if self._due(config.checkpoint.hf_every):
                self.export(position.update)
            saving_s = time.monotonic() - started
        self.sync.finish_probe()  # of the last version

    def _update(self) -> dict[str, float]:
        started = time.monotonic()
        batch = self.loader.lease(self.position.version)
        sync = self.sync.finish_probe()  # before the step: these are still the weights that it is of
        report = self._step(batch)
        self.position.update += 1  # from here on these are the weights, whatever becomes of their sync
        if report.stepped:
            self.position.version, self.position.score = self.position.version + 1, None
            sync |= self.sync.push(self.position.version)
        self.loader.commit(batch, version=self.position.version, stepped=report.stepped)
        seconds = time.monotonic() - started
        times = {
            "time/wait": batch.wait_s,
            "time/forward_backward": report.forward_backward_s,
            "time/optimizer": report.optimizer_s,
            "time/sync": sync.get("sync/seconds", 0.0),
            "time/probe": sync.get("time/probe", 0.0),
        }
        known = sum(times.values()) + report.metrics.get("time/replay_check", 0.0)
        return {
            "update": self.position.update,
            "version": self.position.version,
            **batch.lease.metrics,
            **report.metrics,
            **sync,
            "train/stepped": float(report.stepped),
            "train/tokens_per_s": batch.num_tokens / seconds,
            **times,
            "time/other": max(0.0, seconds - known),
            "time/update": seconds,
            "time/trainer_idle": batch.wait_s / seconds,
        }

    def _step(self, batch: Batch) -> StepReport:
        train = self.config.train
        if not batch.signal and train.skip_without_signal:
            return self.step.skip()
        every = train.replay_check_every
        check = every > 0 and (self.position.update + 1) % every == 0
        return self.step.update(batch.micro_batches, batch.constants, check_replay=check)

    def _evaluate(self, name: str) -> dict[str, float]:
        metrics = self.evaluate(name) if self.config.evaluation_sets else {}
        rewards = [value for name, value in metrics.items() if name.endswith("/reward/mean")]
        self.position.score = rewards[0] if rewards else self.position.score
        return metrics

    def _due(self, every: int) -> bool:
        return every > 0 and self.position.update % every == 0
