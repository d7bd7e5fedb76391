"""After each weight sync one engine generates fresh tokens, whose log-probabilities must be the trainer's.

They are generated while training goes on, and compared before the next optimizer step changes the weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_fr.config import RunConfig
from megatron_fr.errors import RequestFailed, SyncError
from megatron_fr.runtime.collectives import from_rank_zero
from megatron_fr.trainer.data.client import RolloutClient, in_thread
from megatron_fr.trainer.data.loader import BatchLoader
from megatron_fr.trainer.policy import Policy
from megatron_fr.trajectory import Trajectory

log = logging.getLogger(__name__)


class EngineProbe:
    """One per rank; one probe is pending at a time, none with ``sync.probe_tokens=0``."""

    def __init__(self, config: RunConfig, policy: Policy, loader: BatchLoader, client: RolloutClient) -> None:
        self._output, self._sync = config.output, config.sync
        self._policy, self._loader, self._client = policy, loader, client
        #: Engine, its version, and the answer, which comes to rank 0 alone.
        self.pending: tuple[str, int, Future[Trajectory] | None] | None = None

    def begin(self, engines: Sequence[str], turn: int, version: int) -> None:
        """Ask one of ``engines``, which hold ``version``, for fresh tokens; another engine each ``turn``."""
        if self._sync.probe_tokens:
            engine = engines[turn % len(engines)]
            self.pending = (engine, version, self._ask(engine))

    def finish(self) -> dict[str, float]:
        """Compare the last push's fresh tokens with this model, which must still have the weights of that push.

        A collective; no metrics where no probe is pending. A sample that differs is followed by another, of another
        prompt, since a few tokens in bfloat16 may differ by chance.

        Raises:
            SyncError: on every rank, when both samples differ by more than ``sync.max_probe_difference`` in mean, or
                the engine did not answer.
        """
        if self.pending is None:
            return {}
        started, limit = time.monotonic(), self._sync.max_probe_difference
        (engine, version, answer), self.pending = self.pending, None
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

    def _ask(self, engine: str) -> Future[Trajectory] | None:
        if dist.get_rank() != 0:
            return None
        # The other ranks may wait in a collective meanwhile, which sync.timeout_s bounds.
        tokens, timeout_s = self._sync.probe_tokens, 0.9 * self._sync.timeout_s
        return in_thread(lambda: self._client.probe(engine, max_tokens=tokens, timeout_s=timeout_s))

    def _difference(self, version: int, answer: Future[Trajectory] | None) -> tuple[float, int]:
        """Mean |log-probability difference| in nats between engine and trainer, and over how many tokens."""

        def result() -> Trajectory:
            assert answer is not None
            try:
                return answer.result()
            except RequestFailed as error:
                raise SyncError(
                    f"after the sync to version {version}: {error}; see the engine's log in {self._output}/logs, raise "
                    f"sync.timeout_s={self._sync.timeout_s:g}, or set sync.probe_tokens=0 to go without the check"
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
