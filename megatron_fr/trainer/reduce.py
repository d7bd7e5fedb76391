"""Metrics of an update from the results of every rank, or its refusal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_fr.algorithm.stats import MAX_NAMES, SUM_NAMES, LossStats, policy_metrics
from megatron_fr.errors import UpdateError
from megatron_fr.trainer.data.batch import MicroBatch
from megatron_fr.trainer.objective import BatchConstants

#: Means over the action tokens; the order of :func:`replay_differences`.
REPLAY_DIFFERENCES = ("policy/train_rollout_logprob_diff_without_replay", "policy/replay_logprob_change")


def reduce_results(
    batches: Sequence[MicroBatch],
    results: Sequence[dict[str, Any]],
    faults: Sequence[str],
    *,
    live: Sequence[torch.Tensor] | None,
    routes: torch.Tensor,
    constants: BatchConstants,
    device: torch.device,
) -> dict[str, float]:
    """Combine micro-batches and ranks; it is a collective.

    Only the last pipeline stage has results. TP ranks hold equal ones, context ranks parts of the same rows.

    Args:
        results: results of the loss, one for each micro-batch.
        faults: messages about values on this rank that are not finite.
        live: log-probabilities of the live router, see :func:`replay_differences`; None without that comparison.
        routes: float64 ``[2]``, (token, layer) pairs for which the live router agrees with the replay, and all pairs.

    Raises:
        UpdateError: some rank has a fault; every rank raises it.
    """
    results = [result for result in results if "fault" not in result]
    counts = bool(results) and parallel_state.get_tensor_model_parallel_rank() == 0
    count_rows = parallel_state.get_context_parallel_rank() == 0
    sums = torch.zeros(len(SUM_NAMES) + 2, dtype=torch.float64, device=device)
    maxima = torch.zeros(len(MAX_NAMES), dtype=torch.float64, device=device)
    if counts:
        for result in results:
            stats: LossStats = result["stats"]
            extra = torch.stack([result["loss"], result["entropy_sum"]])
            sums += torch.cat([stats.sums(count_rows), extra]).to(device)
            maxima = torch.maximum(maxima, stats.maxima().to(device))
    # Without sequence parallelism every TP rank counts the same tokens, which leaves the share unchanged.
    parts = [sums, routes.to(device)]
    if live is not None:
        check = torch.zeros(2, dtype=torch.float64)
        if counts and not faults:
            check = replay_differences(batches, live, [result["logprobs"] for result in results])
        parts.append(check.to(device))
    sums = torch.cat([*parts, sums.new_tensor([len(faults)])])
    dist.all_reduce(sums)
    if sums[-1]:
        raise UpdateError(_first_fault(faults))
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
    mine: list[dict[str, float]] = []
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        mine = [{name: float(value) for name, value in result["own"].items()} for result in results]
    gathered: list[list[dict[str, float]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, mine)
    totals: dict[str, float] = {}
    for name, value in (item for found in gathered for part in found for item in part.items()):
        totals[f"loss/{name}"] = totals.get(f"loss/{name}", 0.0) + value
    return totals


def _first_fault(faults: Sequence[str]) -> str:
    """Message of the lowest rank that has one, gathered on every rank."""
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, list(faults))
    rank, message = next((rank, messages[0]) for rank, messages in enumerate(gathered) if messages)
    return f"update refused, weights unchanged; trainer rank {rank}: {message}"


def replay_differences(
    batches: Sequence[MicroBatch], live: Sequence[torch.Tensor], replayed: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Sum ``|live - behavior|`` and ``|replayed - live|`` over this rank's action tokens: float64 ``[2]``.

    Args:
        live: float32 ``[r, c]`` for each micro-batch, log-probabilities with the live router's experts.
        replayed: the same with the engine's experts.
    """
    total = torch.zeros(2, dtype=torch.float64, device=batches[0].tokens.device)
    for batch, without, with_replay in zip(batches, live, replayed, strict=True):
        for i, difference in enumerate((without - batch.behavior_logprobs, with_replay - without)):
            total[i] += torch.where(batch.action_mask, difference.double().abs(), 0).sum()
    return total
