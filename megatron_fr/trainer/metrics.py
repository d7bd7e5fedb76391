"""The metrics of one update, and where they are recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch.distributed as dist

from megatron_fr.config import RunConfig
from megatron_fr.observe.metrics import MetricsWriter
from megatron_fr.observe.progress import Progress
from megatron_fr.trainer.data.loader import Batch
from megatron_fr.trainer.step import StepReport


def update_metrics(batch: Batch, report: StepReport, sync: Mapping[str, float], *, seconds: float) -> dict[str, float]:
    """Metrics of the batch, the step and the sync, and where the time went.

    Args:
        sync: metrics of the last version's probe, and of the sync if there was one.
        seconds: duration of the whole update.
    """
    return {
        **batch.lease.metrics,
        **report.metrics,
        "time/probe": 0.0,
        **sync,
        "train/stepped": float(report.stepped),
        "train/tokens_per_s": batch.num_tokens / seconds,
        "time/wait": batch.wait_s,
        "time/forward_backward": report.forward_backward_s,
        "time/optimizer": report.optimizer_s,
        "time/sync": sync.get("sync/seconds", 0.0),
        "time/update": seconds,
        "time/trainer_idle": batch.wait_s / seconds,
    }


@contextlib.contextmanager
def recorder(config: RunConfig) -> Iterator[Callable[[Mapping[str, float]], None]]:
    """Yield what takes each update's metrics: on rank 0 it writes and prints them, elsewhere it does nothing.

    Raises:
        MegatronFRError: ``output`` cannot be written to.
    """
    if dist.get_rank() != 0:
        yield lambda metrics: None
        return
    progress = Progress(config.train.num_updates)
    with MetricsWriter(config.output) as writer:
        yield lambda metrics: progress.update(writer.write(metrics))
