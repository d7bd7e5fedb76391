"""The trainer's wait for a held-out evaluation, which the rollout service runs."""

from __future__ import annotations

import torch.distributed as dist

from megatron_fr.runtime.collectives import from_rank_zero, waiting_for
from megatron_fr.trainer.data.client import RolloutClient, in_thread
from megatron_fr.trainer.data.loader import Shutdown

_TURN_S = 1.0


def run_evaluation(client: RolloutClient, stop: object, name: str) -> dict[str, float]:
    """Evaluate the weights that the engines hold; a collective. The metrics are named ``eval/...``.

    Raises:
        Shutdown: asked to stop meanwhile.
        RolloutEnded: the service cannot evaluate.
    """
    pending = in_thread(lambda: client.evaluate(name)) if dist.get_rank() == 0 else None

    def wait_one_turn() -> tuple[bool, dict[str, float] | None]:
        assert pending is not None
        try:
            return False, pending.result(timeout=_TURN_S)
        except TimeoutError:
            return bool(stop), None

    metrics: dict[str, float] | None = None
    with waiting_for(f"the evaluation {name!r}"):
        while metrics is None:
            # In turns: neither a stop request nor another rank's collective may wait for the evaluation's end.
            stopped, metrics = from_rank_zero(wait_one_turn)
            if stopped:
                raise Shutdown
    return {f"eval/{key}": value for key, value in metrics.items()}
