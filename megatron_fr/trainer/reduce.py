"""Metrics of an update from the results of every rank, or its refusal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_fr.algorithm.stats import MAX_NAMES, SUM_NAMES, LossStats, policy_metrics
from megatron_fr.errors import UpdateError
from megatron_fr.trainer.data.batch import MicroBatch
from megatron_fr.trainer.objective import BatchConstants

#: Means over the action tokens; the order of :func:`_replay_differences`.
REPLAY_DIFFERENCES = ("policy/train_rollout_logprob_diff_without_replay", "policy/replay_logprob_change")


def reduce_results(
    batches: Sequence[MicroBatch],
    results: Sequence[dict[str, Any]],
    faults: Sequence[str],
    *,
    live: Sequence[torch.Tensor] | None,
    routes: tuple[float, float],
    constants: BatchConstants,
    device: torch.device,
) -> dict[str, float]:
    """Combine micro-batches and ranks; a collective.

    Only the last pipeline stage has results. TP ranks hold equal ones, context ranks parts of the same rows.

    Args:
        faults: messages about values on this rank that are not finite.
        live: see :func:`_replay_differences`; None without that comparison.
        routes: see :meth:`RoutingReplay.end`.

    Raises:
        UpdateError: some rank has a fault; every rank raises it.
    """
    results = [result for result in results if "fault" not in result]
    counts = bool(results) and parallel_state.get_tensor_model_parallel_rank() == 0
    count_rows = parallel_state.get_context_parallel_rank() == 0
    sums = torch.zeros(len(SUM_NAMES) + 2, dtype=torch.float64, device=device)
    maxima = torch.zeros(len(MAX_NAMES), dtype=torch.float64, device=device)
    for result in results if counts else []:
        stats: LossStats = result["stats"]
        extra = torch.stack([result["loss"], result["entropy_sum"]])
        sums += torch.cat([stats.sums(count_rows), extra]).to(device)
        maxima = torch.maximum(maxima, stats.maxima().to(device))
    # Without sequence parallelism every TP rank counts the same tokens, which leaves the share unchanged.
    parts = [sums, sums.new_tensor(routes)]
    if live is not None:
        check = torch.zeros(2, dtype=torch.float64)
        if counts and not faults:
            check = _replay_differences(batches, live, [result["logprobs"] for result in results])
        parts.append(check.to(device))
    sums = torch.cat([*parts, sums.new_tensor([len(faults)])])
    dist.all_reduce(sums)
    if sums[-1]:
        rank, message = next((rank, found[0]) for rank, found in enumerate(_gather(list(faults))) if found)
        raise UpdateError(f"update refused, weights unchanged; trainer rank {rank}: {message}")
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    loss, entropy, agreeing, counted, *differences, _faults = sums[len(SUM_NAMES) :].tolist()
    metrics = policy_metrics(sums[: len(SUM_NAMES)], maxima)
    metrics["policy/entropy"] = entropy / max(constants.action_tokens, 1)
    metrics["train/loss"] = loss
    if counted:
        metrics["policy/route_agreement"] = agreeing / counted
    for name, total in zip(REPLAY_DIFFERENCES, differences, strict=False):
        metrics[name] = total / max(constants.action_tokens, 1)
    return metrics


def reduce_own_statistics(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """``loss/...``: sums over all micro-batches and ranks of what the user's own loss returned; a collective."""
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    mine = [(name, float(value)) for result in results for name, value in result["own"].items() if first]
    totals: dict[str, float] = {}
    for name, value in chain(*_gather(mine)):
        totals[f"loss/{name}"] = totals.get(f"loss/{name}", 0.0) + value
    return totals


def _gather[T](mine: list[T]) -> list[list[T]]:
    gathered: list[list[T]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, mine)
    return gathered


def _replay_differences(
    batches: Sequence[MicroBatch], live: Sequence[torch.Tensor], replayed: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Sum ``|live - behavior|`` and ``|replayed - live|`` over this rank's action tokens: float64 ``[2]``.

    ``live`` and ``replayed`` are log-probabilities ``[r, c]`` with the live router's and with the engine's experts.
    """
    total = torch.zeros(2, dtype=torch.float64, device=batches[0].tokens.device)
    for batch, without, with_replay in zip(batches, live, replayed, strict=True):
        for i, difference in enumerate((without - batch.behavior_logprobs, with_replay - without)):
            total[i] += torch.where(batch.action_mask, difference.double().abs(), 0).sum()
    return total
