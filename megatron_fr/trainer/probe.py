"""After each weight sync one engine generates fresh tokens, whose log-probabilities must be the trainer's.

They are generated while training goes on, and compared before the next optimizer step changes the weights.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_fr.config import RunConfig
from megatron_fr.errors import RequestFailed, SyncError
from megatron_fr.runtime.collectives import from_rank_zero
from megatron_fr.trainer.data.client import RolloutClient
from megatron_fr.trainer.data.loader import BatchLoader
from megatron_fr.trainer.policy import Policy
from megatron_fr.trajectory import Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pending:
    """Fresh tokens that an engine generates under ``version``; the answer comes to rank 0 alone."""

    engine: str
    version: int
    answer: Future[Trajectory] | None


class EngineProbe:
    """One per rank; one probe is pending at a time, none with ``sync.probe_tokens=0``."""

    def __init__(self, config: RunConfig, policy: Policy, loader: BatchLoader, client: RolloutClient) -> None:
        self._config = config
        self._policy = policy
        self._loader = loader
        self._client = client
        self._pending: Pending | None = None

    @property
    def pending(self) -> bool:
        """Whether a probe waits for :meth:`finish`."""
        return self._pending is not None

    def begin(self, engines: Sequence[str], turn: int, version: int) -> None:
        """Ask one of ``engines`` for fresh tokens, another each ``turn``; :meth:`finish` has ended the last probe.

        Args:
            version: version that the engines hold.
        """
        if self._config.sync.probe_tokens:
            engine = engines[turn % len(engines)]
            self._pending = Pending(engine, version, self._ask_in_thread(engine) if dist.get_rank() == 0 else None)

    def finish(self) -> dict[str, float]:
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

    def _result(self, probe: Pending, *, again: bool = False) -> Trajectory:
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
