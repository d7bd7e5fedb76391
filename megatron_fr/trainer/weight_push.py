"""The trainer's part of a weight sync: every rank gathers, rank 0 publishes, all of them learn how it went.

After each sync one engine generates fresh tokens, whose log-probabilities must be the trainer's. The first sync waits
for them. Later they are generated while training goes on, and compared before the next optimizer step.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_fr.config import RunConfig
from megatron_fr.errors import RequestFailed, SyncError
from megatron_fr.hf.export import hf_tensor_specs
from megatron_fr.runtime.collectives import from_rank_zero
from megatron_fr.runtime.device import Device
from megatron_fr.trainer.data.client import RolloutClient
from megatron_fr.trainer.data.loader import BatchLoader
from megatron_fr.trainer.policy import Policy
from megatron_fr.trajectory import Trajectory
from megatron_fr.weight_sync.engines import EngineCalls
from megatron_fr.weight_sync.publisher import SyncReport, WeightPublisher
from megatron_fr.weight_sync.transport import TransportContext

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Probe:
    """Fresh tokens that an engine generates under ``version``; the answer comes to rank 0 alone."""

    engine: str
    version: int
    answer: Future[Trajectory] | None


class WeightSync:
    """Connects rank 0 to the engines and pushes versions. One per rank.

    Args:
        host: this machine's address as the engines reach it.

    Raises:
        SyncError: engines cannot be reached with ``sync.transport``.
        ConfigError: ``sync.transport`` cannot be imported.
    """

    def __init__(
        self, config: RunConfig, device: Device, policy: Policy, loader: BatchLoader, client: RolloutClient, host: str
    ) -> None:
        self._config = config
        self._policy = policy
        self._loader = loader
        self._client = client
        self._engines: list[str] = from_rank_zero(lambda: list(client.status()["engines"]))
        self._pushes = 0
        self._pending: Probe | None = None
        self._publisher: WeightPublisher | None = None
        from_rank_zero(lambda: self._connect(device.collective_backend, host))

    def push(self, version: int) -> dict[str, float]:
        """Bring every engine to ``version``, and ask one for fresh tokens; the first push waits for them.

        A collective. :meth:`finish_probe` must have ended the last probe.

        Returns:
            metrics of the sync, and of the first push's probe.

        Raises:
            SyncError: the engines did not take the weights, or hold something else.
        """
        if self._pending is not None:
            raise RuntimeError("call finish_probe before the optimizer step: the probe is of the weights before it")
        first = self._pushes == 0
        started = time.monotonic()
        report = self._publish(version, passes=2 if first and self._config.sync.verify else 1)
        metrics = {"sync/verify_s": report.verify_s, "sync/bytes": float(report.num_bytes)}
        metrics["sync/seconds"] = time.monotonic() - started
        if self._config.sync.probe_tokens:
            engine = self._engines[self._pushes % len(self._engines)]
            self._pending = Probe(engine, version, self._ask_in_thread(engine) if dist.get_rank() == 0 else None)
        self._pushes += 1
        return metrics | self.finish_probe() if first else metrics

    def finish_probe(self) -> dict[str, float]:
        """Compare the last push's fresh tokens with this model, which must still have the weights of that push.

        A collective. One sample that differs is followed by another of another prompt, since a few tokens in bfloat16
        may differ by chance.

        Returns:
            ``sync/probe_logprob_diff`` (mean |difference|, nats), ``sync/probe_version`` (that it belongs to) and
            ``time/probe`` (seconds spent here); nothing where no probe is pending.

        Raises:
            SyncError: on every rank, when both samples differ by more than ``sync.max_probe_difference``, or the
                engine did not answer.
        """
        if self._pending is None:
            return {}
        started = time.monotonic()
        probe, self._pending = self._pending, None
        limit = self._config.sync.max_probe_difference
        mean, count = self._difference(from_rank_zero(lambda: self._result(probe)))
        if not mean <= limit:
            log.warning(
                "engine %s: its fresh tokens of version %d differ by %.3g nats; once more with another prompt",
                probe.engine,
                probe.version,
                mean,
            )
            mean, count = self._difference(from_rank_zero(lambda: self._result(probe, again=True)))
        if not mean <= limit:
            raise SyncError(
                f"after the sync to version {probe.version}, engine {probe.engine} and the trainer differ by "
                f"{mean:.3g} in mean |log-probability| of {count} tokens, above sync.max_probe_difference={limit}; the "
                "engine's weights or numerics are not the trainer's"
            )
        seconds = time.monotonic() - started
        return {"sync/probe_logprob_diff": mean, "sync/probe_version": float(probe.version), "time/probe": seconds}

    def close(self) -> None:
        """Leave the engines."""
        if self._publisher is not None:
            self._publisher.close()

    def _connect(self, backend: str, host: str) -> None:
        """On rank 0."""
        config, policy = self._config, self._policy
        # Of the names and shapes alone; a push has the dtype of the parameters.
        specs = hf_tensor_specs(policy.spec, torch.float32)
        self._publisher = WeightPublisher(
            TransportContext(
                engines=EngineCalls(self._engines, config.sync.timeout_s),
                shapes={spec.name: spec.shape for spec in specs},
                config=config.sync,
                engine_tp=config.rollout.engine_tp,
                backend=backend,
                host=host,
                model_folder=policy.source,
                output=config.output,
            )
        )
        self._publisher.connect()

    def _publish(self, version: int, passes: int) -> SyncReport:
        """Rank 0 publishes what all ranks gather together, ``passes`` times; its report on every rank.

        Raises:
            SyncError: publishing failed; every rank raises it.
        """
        streams = [self._policy.hf_tensors() for _ in range(passes)]

        def publish() -> SyncReport:
            assert self._publisher is not None
            named = [((name, tensor) for name, tensor in stream if tensor is not None) for stream in streams]
            try:
                return self._publisher.publish(version, *named)
            finally:
                drain()  # where it broke off half-way: the other ranks walk the streams to their ends

        def drain() -> None:
            for stream in streams:
                for _ in stream:
                    continue

        if dist.get_rank() != 0:
            drain()
        return from_rank_zero(publish)

    def _ask_in_thread(self, engine: str) -> Future[Trajectory]:
        """Fresh tokens of ``engine``, asked for in a thread that does not keep the process alive."""
        answer: Future[Trajectory] = Future()
        sync = self._config.sync

        def ask() -> None:
            try:
                # The other ranks may wait in a collective meanwhile, which sync.timeout_s bounds.
                answer.set_result(
                    self._client.probe(engine, max_tokens=sync.probe_tokens, timeout_s=0.9 * sync.timeout_s)
                )
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=ask, name="probe", daemon=True).start()
        return answer

    def _result(self, probe: Probe, *, again: bool = False) -> Trajectory:
        """The answer, or with ``again`` one to a new request; on rank 0."""
        answer = self._ask_in_thread(probe.engine) if again else probe.answer
        assert answer is not None
        sync = self._config.sync
        try:
            return answer.result()
        except RequestFailed as error:
            raise SyncError(
                f"after the sync to version {probe.version}: {error}; see the engine's log in "
                f"{self._config.output}/logs, raise sync.timeout_s={sync.timeout_s:g}, or set sync.probe_tokens=0 to "
                "go without the check"
            ) from error

    def _difference(self, trajectory: Trajectory) -> tuple[float, int]:
        """Mean |log-probability difference| in nats between engine and trainer, and over how many tokens."""
        batch = self._loader.probe_batch(trajectory)
        logprobs = self._policy.step.logprobs(batch)
        total = torch.zeros(2, dtype=torch.float64, device=batch[0].tokens.device)
        if logprobs and parallel_state.get_tensor_model_parallel_rank() == 0:
            mask = batch[0].action_mask
            difference = (logprobs[0] - batch[0].behavior_logprobs).abs()
            total[0], total[1] = torch.where(mask, difference, 0).double().sum(), mask.sum()
        dist.all_reduce(total)
        return float(total[0] / total[1].clamp(min=1)), int(total[1])
