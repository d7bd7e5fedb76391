"""What ranks do in the update tests: the trainer's own pieces from the leased batch to the stepped weights."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_fr.config import RunConfig
from megatron_fr.trainer.data.client import Lease, LeasedItem
from megatron_fr.trajectory import Trajectory, decode
from tests.support.update_reference import UNTRAINED, Decision, Update
from tests.support.update_scenario import OPTIMIZER, SCENARIOS, TEMPERATURE


@dataclass
class Job:
    """One update in one layout.

    Attributes:
        folder: of the model, named after its scenario; ``batch.npz`` in it holds the encoded trajectories.
        parallel, train: fields of the configuration's sections.
    """

    folder: Path
    parallel: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)

    def groups(self) -> list[int]:
        """What decides about process groups."""
        p = self.config().parallel
        return [p.tp, p.pp, p.vpp, p.cp, p.ep, p.etp]

    def config(self) -> RunConfig:
        """The run's configuration."""
        scenario = SCENARIOS[self.folder.name]
        return RunConfig.model_validate(
            {
                "model": {"path": str(self.folder), "dtype": "float32"},
                "parallel": self.parallel,
                "train": {"num_updates": 1, "batch_size": len(scenario.shapes), "micro_batch_size": 3, **self.train},
                "algorithm": scenario.own_loss or scenario.algorithm,
                "optimizer": OPTIMIZER,
                "rollout": {"temperature": TEMPERATURE},
                "reward": {"function": "unused:unused"},
                "data": {"train": "unused.jsonl"},
            }
        )


#: By number of processes: for each group of jobs, for each job, what each rank answered.
Answers = Callable[[int], dict[str, list[list[dict[str, Any]]]]]


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
    """Metrics, decisions, gradients before clipping, and weights after the step of each job; tensors on rank 0 only."""
    from megatron_fr.runtime.device import resolve_device
    from megatron_fr.trainer import distributed

    device = resolve_device("cpu")
    answers: dict[int, dict[str, Any]] = {}
    groups: list[int] = []
    # Jobs of the same groups one after the other: to make them takes longer than an update.
    for number in sorted(range(len(jobs)), key=lambda n: jobs[n].groups()):
        if jobs[number].groups() != groups:
            _forget_groups()
            groups = jobs[number].groups()
            distributed.initialize(jobs[number].config().parallel, device, seed=1, timeout_s=60)
        answers[number] = _update(jobs[number], device)
    return [answers[number] for number in range(len(jobs))]


def _forget_groups() -> None:
    """Megatron-Core forgets its groups without ending them, and each of gloo's has threads."""
    if not torch.distributed.is_initialized():
        return
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    gc.collect()  # models, whose cycles hold groups
    torch.distributed.barrier()
    for group in list(torch.distributed.distributed_c10d._world.pg_map):
        if group is not torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group(group)


def _update(job: Job, device: Any) -> dict[str, Any]:
    config = job.config()
    from megatron.core import parallel_state

    from megatron_fr.hf.export import iter_hf_tensors
    from megatron_fr.trainer.data.loader import BatchLoader
    from megatron_fr.trainer.policy import build_policy

    policy = build_policy(config, device)
    client: Any = ListedBatch(decode((job.folder / "batch.npz").read_bytes()))
    loader = BatchLoader(config, policy, client, device.torch_device)
    batch = loader.lease(0)
    assert batch.signal

    step = policy.step
    gradients: dict[str, torch.Tensor] = {}
    plain_step = step.optimizer.step

    def keeping_step() -> Any:
        gradients.update(_gradients(step.chunks, policy.spec))
        return plain_step()

    step.optimizer.step = keeping_step
    calls = _count_forwards(policy.chunks)
    decisions = _watch_decisions(step.objective)
    report = step.update(batch.micro_batches, batch.constants, check_replay=config.train.replay_check_every > 0)
    assert report.stepped
    data_rank = parallel_state.get_data_parallel_rank()
    weights = {n: t.clone() for n, t in iter_hf_tensors(policy.chunks, policy.spec) if t is not None}
    return {
        "metrics": report.metrics,
        "gradients": gradients,
        "weights": weights,
        "micro_batches": len(batch.micro_batches),
        "model_calls": calls,
        "decisions": decisions,
        "data_rank": data_rank,
    }


def joined_update(answers: list[dict[str, Any]]) -> Update:
    """One update from the answers of its ranks; ranks that saw the same trajectory must say the same of it."""
    decisions: dict[int, Decision] = {}
    for answer in answers:
        for tokens, decision in [item for rows in answer["decisions"] for item in rows.items()]:
            assert decisions.setdefault(tokens, decision) == decision
    first = answers[0]
    return Update(first["metrics"], first["gradients"], first["weights"], decisions)


def _watch_decisions(objective: Any) -> list[dict[int, Decision]]:
    """What the objective will say of each row of each micro-batch, by the row's number of action tokens.

    Filled on the last pipeline stage, by the update's own forward.
    """
    decisions: list[dict[int, Decision]] = []
    plain_loss = objective.loss

    def watched(*arguments: Any) -> Any:
        loss, stats, own = plain_loss(*arguments)
        rows = zip(stats.trajectory_tokens.tolist(), stats.sequence_kl.tolist(), stats.admitted.tolist(), strict=True)
        decisions.append({tokens: Decision(kl, admitted) for tokens, kl, admitted in rows if tokens})
        return loss, stats, own

    objective.loss = watched
    return decisions


def _count_forwards(chunks: Sequence[torch.nn.Module]) -> list[int]:
    calls = [0] * len(chunks)
    for index, chunk in enumerate(chunks):

        def count(*_: Any, index: int = index) -> None:
            calls[index] += 1

        chunk.register_forward_pre_hook(count)
    return calls


def _gradients(ddp_chunks: Sequence[Any], spec: Any) -> dict[str, torch.Tensor]:
    """Megatron's finished gradients under their Hugging Face names; a collective."""
    from megatron_fr.hf.export import iter_hf_tensors

    _join_shards(ddp_chunks)
    parameters = [p for chunk in ddp_chunks for p in chunk.parameters()]
    kept = [p.data for p in parameters]
    for p in parameters:
        p.data = p.main_grad
    tensors = iter_hf_tensors(ddp_chunks, spec)
    found = {n: t.clone() for n, t in tensors if t is not None and not n.endswith(UNTRAINED)}
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
