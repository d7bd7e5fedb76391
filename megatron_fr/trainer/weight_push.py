"""The trainer's part of a weight sync: every rank gathers, rank 0 publishes, all of them learn how it went."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_fr.config import RunConfig
from megatron_fr.errors import RequestFailed, SyncError
from megatron_fr.runtime.collectives import from_rank_zero
from megatron_fr.runtime.device import Device
from megatron_fr.trainer.data.client import RolloutClient
from megatron_fr.trainer.data.loader import BatchLoader
from megatron_fr.trainer.policy import Policy
from megatron_fr.trajectory import Trajectory
from megatron_fr.weight_sync.engine_layout import engine_layout
from megatron_fr.weight_sync.publisher import SyncReport, WeightPublisher


@dataclass(frozen=True)
class SyncMetrics:
    """Of one sync: seconds, those of comparing checksums among them, bytes, and of its probe seconds and mean
    |log-probability difference| (None: no probe)."""

    seconds: float
    verify_s: float
    num_bytes: int
    probe_s: float
    probe_difference: float | None


class WeightSync:
    """Connects rank 0 to the engines and pushes versions. One per rank.

    Args:
        host: this machine's address as the engines reach it.
    """

    def __init__(
        self, config: RunConfig, device: Device, policy: Policy, loader: BatchLoader, client: RolloutClient, host: str
    ) -> None:
        self._config = config
        self._policy = policy
        self._loader = loader
        self._client = client
        self._engines: list[str] = from_rank_zero(lambda: list(client.status()["engines"]))
        self._probes = 0
        self._publisher: WeightPublisher | None = None
        if dist.get_rank() == 0:
            self._publisher = WeightPublisher(
                self._engines,
                layout=engine_layout(policy.hf_config, device.kind),
                verify=config.sync.verify,
                dtype=config.model.dtype,
                engine_world_size=config.rollout.engine_tp,
                backend=device.collective_backend,
                host=host,
                max_bucket_bytes=config.sync.bucket_mb * 2**20,
                timeout_s=config.sync.timeout_s,
            )
        from_rank_zero(lambda: self._publisher.connect() if self._publisher else None)

    def push(self, version: int) -> SyncMetrics:
        """Bring every engine to ``version``, and compare its weights and fresh tokens with this model.

        Raises:
            SyncError: the engines did not take the weights, or compute something else with them.
        """
        started = time.monotonic()
        report = _gather_and_publish(self._publisher, self._policy, version)
        seconds = time.monotonic() - started
        started = time.monotonic()
        difference = self._probe(version)
        return SyncMetrics(seconds, report.verify_s, report.num_bytes, time.monotonic() - started, difference)

    def close(self) -> None:
        """Leave the update group."""
        if self._publisher is not None:
            self._publisher.close()

    def _probe(self, version: int) -> float | None:
        sync = self._config.sync
        if sync.probe_tokens == 0:
            return None
        engine = self._engines[self._probes % len(self._engines)]
        self._probes += 1
        trajectory = from_rank_zero(lambda: self._probe_trajectory(engine, version))
        batch = self._loader.probe_batch(trajectory)
        logprobs = self._policy.step.logprobs(batch)
        total = torch.zeros(2, dtype=torch.float64, device=batch[0].tokens.device)
        if logprobs and parallel_state.get_tensor_model_parallel_rank() == 0:
            mask = batch[0].action_mask
            difference = (logprobs[0] - batch[0].behavior_logprobs).abs()
            total[0], total[1] = torch.where(mask, difference, 0).double().sum(), mask.sum()
        dist.all_reduce(total)
        mean = float(total[0] / total[1].clamp(min=1))
        if not mean <= sync.max_probe_difference:
            raise SyncError(
                f"after the sync to version {version}, engine {engine} and the trainer differ by {mean:.3g} in mean "
                f"|log-probability| of {int(total[1])} tokens, above sync.max_probe_difference="
                f"{sync.max_probe_difference}; the engine's weights or numerics are not the trainer's"
            )
        return mean

    def _probe_trajectory(self, engine: str, version: int) -> Trajectory:
        sync = self._config.sync
        try:
            # Meanwhile the other ranks wait in a collective that sync.timeout_s bounds.
            return self._client.probe(engine, max_tokens=sync.probe_tokens, timeout_s=0.9 * sync.timeout_s)
        except RequestFailed as error:
            raise SyncError(
                f"after the sync to version {version}: {error}; see the engine's log in {self._config.output}/logs, "
                f"raise sync.timeout_s={sync.timeout_s:g}, or set sync.probe_tokens=0 to go without the check"
            ) from error


def _gather_and_publish(publisher: WeightPublisher | None, policy: Policy, version: int) -> SyncReport:
    """Rank 0 publishes the stream that all ranks gather together; returns its report on every rank.

    Raises:
        SyncError: publishing failed; every rank raises it.
    """
    stream = policy.hf_tensors()
    box: list[Any] = [None, None]
    if publisher is not None:
        named = ((name, tensor) for name, tensor in stream if tensor is not None)
        try:
            box[0] = publisher.publish(named, version)
        except SyncError as error:
            box[1] = str(error)
    # The other ranks walk the stream for its collectives; so does rank 0 when publishing broke off half-way.
    for _ in stream:
        continue
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    report, failure = box
    if report is None:
        raise SyncError(str(failure))
    assert isinstance(report, SyncReport)
    return report
