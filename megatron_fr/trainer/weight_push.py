"""The trainer's part of a weight sync: every rank gathers, rank 0 publishes, all of them learn how it went.

After each sync one engine generates fresh tokens while training goes on. Their log-probabilities must be the trainer's;
they are compared before the next optimizer step changes the weights.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import Future
from itertools import chain

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_fr.config import RunConfig
from megatron_fr.errors import RequestFailed, SyncError
from megatron_fr.hf.export import hf_tensor_specs
from megatron_fr.runtime.collectives import from_rank_zero, waiting_for
from megatron_fr.runtime.device import Device
from megatron_fr.trainer.data.client import RolloutClient, in_thread
from megatron_fr.trainer.data.loader import BatchLoader
from megatron_fr.trainer.policy import Policy
from megatron_fr.trajectory import Trajectory
from megatron_fr.weight_sync.engines import EngineCalls
from megatron_fr.weight_sync.publisher import SyncReport, WeightPublisher
from megatron_fr.weight_sync.transport import TransportContext

log = logging.getLogger(__name__)


class WeightSync:
    """Connects rank 0, at ``host`` for the engines, pushes versions and probes the engines. One per rank.

    Raises:
        SyncError: engines cannot be reached with ``sync.transport``.
        ConfigError: ``sync.transport`` cannot be imported.
    """

    def __init__(
        self, config: RunConfig, device: Device, policy: Policy, loader: BatchLoader, client: RolloutClient, host: str
    ) -> None:
        self._config, self._policy, self._loader, self._client = config, policy, loader, client
        self._engines: list[str] = from_rank_zero(lambda: list(client.status()["engines"]))
        self._pushes = 0
        #: Engine, its version, and on rank 0 its answer; none with ``sync.probe_tokens=0``.
        self._probe: tuple[str, int, Future[Trajectory] | None] | None = None
        self._publisher: WeightPublisher | None = None
        from_rank_zero(lambda: self._connect(device.collective_backend, host))

    def push(self, version: int) -> dict[str, float]:
        """Bring every engine to ``version`` and ask one for fresh tokens; the first push waits for them. A collective.

        Raises:
            RuntimeError: :meth:`finish_probe` has not ended the last probe.
            SyncError: the engines did not take the weights, or hold something else.
        """
        if self._probe is not None:
            raise RuntimeError("call finish_probe before the optimizer step: the probe is of the weights before it")
        first = self._pushes == 0
        started = time.monotonic()
        with waiting_for(f"the sync of version {version} to {len(self._engines)} engine(s)"):
            report = self._publish(version, passes=2 if first and self._config.sync.verify else 1)
        metrics = {"sync/verify_s": report.verify_s, "sync/bytes": float(report.num_bytes)}
        metrics["sync/seconds"] = time.monotonic() - started
        if self._config.sync.probe_tokens:
            engine = self._engines[self._pushes % len(self._engines)]
            self._probe = (engine, version, self._ask(engine))
        self._pushes += 1
        return metrics | self.finish_probe() if first else metrics

    def finish_probe(self) -> dict[str, float]:
        """Compare the last push's fresh tokens with this model, which must still have the weights of that push.

        A collective; no metrics where no probe is pending. A sample that differs is followed by another, of another
        prompt, since a few tokens in bfloat16 may differ by chance.

        Raises:
            SyncError: on every rank, when both samples differ by more than ``sync.max_probe_difference`` in mean, or
                the engine did not answer.
        """
        if self._probe is None:
            return {}
        started, limit = time.monotonic(), self._config.sync.max_probe_difference
        (engine, version, answer), self._probe = self._probe, None
        mean, count = self._difference(version, answer)
        if not mean <= limit:
            log.warning("engine %s, version %d: fresh tokens differ by %.3g nats; once more", engine, version, mean)
            mean, count = self._difference(version, self._ask(engine))
        if not mean <= limit:
            raise SyncError(
                f"after the sync to version {version}, engine {engine} and the trainer differ by {mean:.3g} in mean "
                f"|log-probability| of {count} tokens, above sync.max_probe_difference={limit}; the engine's weights "
                "or numerics are not the trainer's"
            )
        seconds = time.monotonic() - started
        return {"sync/probe_logprob_diff": mean, "sync/probe_version": float(version), "time/probe": seconds}

    def close(self) -> None:
        """Leave the engines."""
        if self._publisher is not None:
            self._publisher.close()

    def _connect(self, backend: str, host: str) -> None:
        config, policy = self._config, self._policy
        context = TransportContext(
            engines=EngineCalls(self._engines, config.sync.timeout_s, self._client.token),
            # Whatever the dtype: a push has that of the parameters.
            shapes={spec.name: spec.shape for spec in hf_tensor_specs(policy.spec, torch.float32)},
            config=config.sync,
            engine_tp=config.rollout.engine_tp,
            backend=backend,
            host=host,
            model_folder=policy.source,
            output=config.output,
        )
        self._publisher = WeightPublisher(context)
        self._publisher.connect()

    def _publish(self, version: int, passes: int) -> SyncReport:
        """Rank 0 publishes what all ranks gather together, ``passes`` times."""
        streams = [self._policy.hf_tensors() for _ in range(passes)]

        def publish() -> SyncReport:
            assert self._publisher is not None
            named = [((name, tensor) for name, tensor in stream if tensor is not None) for stream in streams]
            try:
                return self._publisher.publish(version, *named)
            finally:
                drain()  # where it broke off half-way: the other ranks walk the streams to their ends

        def drain() -> None:
            deque(chain(*streams), maxlen=0)

        if dist.get_rank() != 0:
            drain()
        return from_rank_zero(publish)

    def _ask(self, engine: str) -> Future[Trajectory] | None:
        if dist.get_rank() != 0:
            return None
        # The other ranks may wait in a collective meanwhile, which sync.timeout_s bounds.
        tokens, timeout_s = self._config.sync.probe_tokens, 0.9 * self._config.sync.timeout_s
        return in_thread(lambda: self._client.probe(engine, max_tokens=tokens, timeout_s=timeout_s))

    def _difference(self, version: int, answer: Future[Trajectory] | None) -> tuple[float, int]:
        """Mean |log-probability difference| in nats between engine and trainer, and over how many tokens."""

        def result() -> Trajectory:
            assert answer is not None
            try:
                return answer.result()
            except RequestFailed as error:
                logs, timeout_s = self._config.output / "logs", self._config.sync.timeout_s
                raise SyncError(
                    f"after the sync to version {version}: {error}; see the engine's log in {logs}, raise "
                    f"sync.timeout_s={timeout_s:g}, or set sync.probe_tokens=0 to go without the check"
                ) from error

        batch = self._loader.probe_batch(from_rank_zero(result))
        logprobs = self._policy.step.logprobs(batch)
        total = torch.zeros(2, dtype=torch.float64, device=batch[0].tokens.device)
        if logprobs and parallel_state.get_tensor_model_parallel_rank() == 0:
            mask = batch[0].action_mask
            difference = (logprobs[0] - batch[0].behavior_logprobs).abs()
            total[0], total[1] = torch.where(mask, difference, 0).double().sum(), mask.sum()
        dist.all_reduce(total)
        return float(total[0] / total[1].clamp(min=1)), int(total[1])
