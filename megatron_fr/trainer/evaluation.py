"""The trainer's wait for a held-out evaluation, which the rollout service runs."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch.distributed as dist

from megatron_fr.runtime.collectives import from_rank_zero
from megatron_fr.trainer.data.client import RolloutClient
from megatron_fr.trainer.stop import Shutdown, StopRequest

_TURN_S = 1.0


class Evaluation:
    """One per rank.

    Args:
        enabled: whether the run has held-out prompts.
    """

    def __init__(self, client: RolloutClient, stop: StopRequest, *, enabled: bool) -> None:
        self._client = client
        self._stop = stop
        self._enabled = enabled

    def run(self, name: str) -> dict[str, float]:
        """Evaluate the weights that the engines hold; a collective.

        Returns:
            metrics ``eval/...``; none where the run has no held-out prompts.

        Raises:
            Shutdown: asked to stop meanwhile.
            RolloutEnded: the service cannot evaluate.
        """
        if not self._enabled:
            return {}
        # The request runs in a thread and the ranks meet every second: neither a stop request nor another rank's
        # collective may wait for the evaluation's end.
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="evaluation")
        try:
            pending = thread.submit(self._client.evaluate, name) if dist.get_rank() == 0 else None
            metrics: dict[str, float] | None = None
            while metrics is None:
                stop, metrics = from_rank_zero(lambda: self._wait_one_turn(pending))
                if stop:
                    raise Shutdown
        finally:
            thread.shutdown(wait=False)
        return {f"eval/{key}": value for key, value in metrics.items()}

    def _wait_one_turn(self, pending: Future[dict[str, float]] | None) -> tuple[bool, dict[str, float] | None]:
        """Whether to stop, and the metrics once the evaluation is done; on rank 0."""
        assert pending is not None
        deadline = time.monotonic() + _TURN_S
        while not self._stop and time.monotonic() < deadline:
            try:
                return False, pending.result(timeout=0.2)
            except TimeoutError:
                continue
        return bool(self._stop), None
