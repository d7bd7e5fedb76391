"""What ranks do in the update tests: the trainer's own pieces from the leased batch to the stepped weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from update_scenario import ALGORITHM, OPTIMIZER, TEMPERATURE

from megatron_fr.config import RunConfig
from megatron_fr.trainer.client import Lease, LeasedItem
from megatron_fr.trajectory import Trajectory, decode


@dataclass
class Job:
    """One update in one layout.

    Attributes:
        folder: of the model; ``batch.npz`` in it holds the encoded trajectories.
        parallel, train, algorithm: fields of the configuration's sections.
        spoil: build another model with routers between the policy and its update.
    """

    folder: Path
    parallel: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    algorithm: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    spoil: bool = False

    def config(self) -> RunConfig:
        """The run's configuration."""
        return RunConfig.model_validate(
            {
                "model": {"path": str(self.folder), "dtype": "float32"},
                "parallel": self.parallel,
                "train": {"num_updates": 1, "batch_size": 7, "micro_batch_size": 3, **self.train},
                "algorithm": ALGORITHM | self.algorithm,
                "optimizer": OPTIMIZER | self.optimizer,
                "rollout": {"temperature": TEMPERATURE},
                "reward": {"function": "unused:unused"},
                "data": {"train": "unused.jsonl"},
            }
        )


class ListedBatch:
    """Serves one batch as the rollout service's client does, from a list."""

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        self._by_id = {t.id: t for t in trajectories}
        self._attempts = 0

    def lease(self, version: int, *, wait_s: float) -> Lease | None:
        del version, wait_s
        self._attempts += 1
        if self._attempts == 1:
            return None  # no full batch yet: every rank asks again
        items = (
            LeasedItem(t.id, t.group_id, len(t), t.num_action_tokens, t.reward, lag=0) for t in self._by_id.values()
        )
        return Lease("batch", tuple(items), {})

    def fetch(self, ids: Sequence[str]) -> list[Trajectory]:
        return [self._by_id[i] for i in ids]


def run_updates(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Metrics, gradients before clipping, and weights after the step of each job; tensors on rank 0 only."""
    return [_update(job) for job in jobs]


def _update(job: Job) -> dict[str, Any]:
    from megatron_fr.device import resolve_device
    from megatron_fr.trainer import distributed

    config = job.config()
    device = resolve_device("cpu")
    distributed.initialize(config.parallel, device, seed=1, timeout_s=60)
    from megatron.core import parallel_state

    from megatron_fr.bridge import iter_hf_tensors, read_hf_config
    from megatron_fr.trainer.feed import BatchFeed
    from megatron_fr.trainer.model import build_model
    from megatron_fr.trainer.policy import build_policy

    policy = build_policy(config, device)
    if job.spoil:
        build_model(read_hf_config(job.folder), config, device)
    client: Any = ListedBatch(decode((job.folder / "batch.npz").read_bytes()))
    feed = BatchFeed.of(config, policy, client, device.torch_device)
    batch = feed.next(0, lambda: False)
    assert batch.signal

    step = policy.step
    gradients: dict[str, torch.Tensor] = {}
    plain_step = step.optimizer.step

    def keeping_step() -> Any:
        gradients.update(_gradients(step.chunks, policy.hf_config))
        return plain_step()

    step.optimizer.step = keeping_step
    calls = _count_forwards(policy.chunks)
    report = step.update(batch.micro_batches, batch.constants, check_replay=config.train.replay_check_every > 0)
    assert report.stepped
    weights = {n: t.clone() for n, t in iter_hf_tensors(policy.chunks, policy.hf_config) if t is not None}
    parallel_state.destroy_model_parallel()
    return {
        "metrics": report.metrics,
        "gradients": gradients,
        "weights": weights,
        "micro_batches": len(batch.micro_batches),
        "model_calls": calls,
    }


def _count_forwards(chunks: Sequence[torch.nn.Module]) -> list[int]:
    calls = [0] * len(chunks)
    for index, chunk in enumerate(chunks):

        def count(*_: Any, index: int = index) -> None:
            calls[index] += 1

        chunk.register_forward_pre_hook(count)
    return calls


def _gradients(ddp_chunks: Sequence[Any], hf_config: Any) -> dict[str, torch.Tensor]:
    """Megatron's finished gradients under their Hugging Face names; a collective."""
    from megatron_fr.bridge import iter_hf_tensors

    _join_shards(ddp_chunks)
    parameters = [p for chunk in ddp_chunks for p in chunk.parameters()]
    kept = [p.data for p in parameters]
    for p in parameters:
        p.data = p.main_grad
    found = {n: t.clone() for n, t in iter_hf_tensors(ddp_chunks, hf_config) if t is not None}
    for p, data in zip(parameters, kept, strict=True):
        p.data = data
    return found


def _join_shards(ddp_chunks: Sequence[Any]) -> None:
    """The distributed optimizer leaves each rank its shard of every bucket; give all ranks the whole."""
    for buffer in _buffers(ddp_chunks):
        group = buffer.data_parallel_group
        if not buffer.ddp_config.use_distributed_optimizer or group.size() == 1:
            continue
        for bucket in buffer.buckets:
            shards = list(bucket.grad_data.chunk(group.size()))
            mine = shards[group.rank()].clone()
            torch.distributed.all_gather(shards, mine, group=group)


def _buffers(ddp_chunks: Sequence[Any]) -> Iterator[Any]:
    for chunk in ddp_chunks:
        yield from chunk.buffers
        yield from chunk.expert_parallel_buffers
