"""The trainer's part of a weight sync: every rank gathers, rank 0 publishes, all of them learn how it went."""

from __future__ import annotations

import time
from collections import deque
from itertools import chain

import torch
import torch.distributed as dist

from megatron_fr.config import RunConfig
from megatron_fr.hf.export import hf_tensor_specs
from megatron_fr.runtime.collectives import from_rank_zero
from megatron_fr.runtime.device import Device
from megatron_fr.trainer.data.client import RolloutClient
from megatron_fr.trainer.data.loader import BatchLoader
from megatron_fr.trainer.policy import Policy
from megatron_fr.trainer.probe import EngineProbe
from megatron_fr.weight_sync.engines import EngineCalls
from megatron_fr.weight_sync.publisher import SyncReport, WeightPublisher
from megatron_fr.weight_sync.transport import TransportContext


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
        self._config, self._policy = config, policy
        self._engines: list[str] = from_rank_zero(lambda: list(client.status()["engines"]))
        self._pushes = 0
        self._probe = EngineProbe(config, policy, loader, client)
        self._publisher: WeightPublisher | None = None
        from_rank_zero(lambda: self._connect(device.collective_backend, host))

    def push(self, version: int) -> dict[str, float]:
        """Bring every engine to ``version`` and ask one for fresh tokens; the first push waits for them. A collective.

        Raises:
            RuntimeError: :meth:`finish_probe` has not ended the last probe.
            SyncError: the engines did not take the weights, or hold something else.
        """
        if self._probe.pending:
            raise RuntimeError("call finish_probe before the optimizer step: the probe is of the weights before it")
        first = self._pushes == 0
        started = time.monotonic()
        report = self._publish(version, passes=2 if first and self._config.sync.verify else 1)
        metrics = {"sync/verify_s": report.verify_s, "sync/bytes": float(report.num_bytes)}
        metrics["sync/seconds"] = time.monotonic() - started
        self._probe.begin(self._engines, self._pushes, version)
        self._pushes += 1
        return metrics | self.finish_probe() if first else metrics

    def finish_probe(self) -> dict[str, float]:
        """See :meth:`EngineProbe.finish`."""
        return self._probe.finish()

    def close(self) -> None:
        """Leave the engines."""
        if self._publisher is not None:
            self._publisher.close()

    def _connect(self, backend: str, host: str) -> None:
        config, policy = self._config, self._policy
        context = TransportContext(
            engines=EngineCalls(self._engines, config.sync.timeout_s),
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
