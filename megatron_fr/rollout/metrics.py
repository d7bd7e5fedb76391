"""Averages over trajectories, by the names under which they are written and plotted, in training and evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_fr.trajectory import Trajectory


def trajectory_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Rewards and their parts, tool use, truncation and lengths of at least one trajectory.

    A named part of the reward is averaged over the trajectories that have it.
    """
    lengths = [len(t) for t in trajectories]
    metrics = {
        "reward/mean": _mean([t.reward for t in trajectories]),
        "tools/calls": _mean([t.num_tool_calls for t in trajectories]),
        "tools/errors": _mean([t.num_tool_errors for t in trajectories]),
        "trajectory/truncated": _mean([t.finish_reason == "length" for t in trajectories]),
        "trajectory/tokens_p50": float(np.percentile(lengths, 50)),
        "trajectory/tokens_p99": float(np.percentile(lengths, 99)),
        "trajectory/action_tokens_mean": _mean([t.num_action_tokens for t in trajectories]),
        "trajectory/turns": _mean([t.num_turns for t in trajectories]),
    }
    for part in sorted({name for t in trajectories for name in t.reward_parts}):
        metrics[f"reward/{part}"] = _mean([t.reward_parts[part] for t in trajectories if part in t.reward_parts])
    return metrics


def evaluation_metrics(by_prompt: Sequence[Sequence[Trajectory]], pass_threshold: float) -> dict[str, float]:
    """Metrics of trajectories grouped by prompt (every group at least one).

    As :func:`trajectory_metrics`, but ``reward/mean`` is avg@k, the mean over prompts of the mean reward, and
    ``reward/pass`` is pass@k, the share of prompts with at least one reward above ``pass_threshold``.
    """
    rewards = [[t.reward for t in group] for group in by_prompt]
    return trajectory_metrics([t for group in by_prompt for t in group]) | {
        "reward/mean": _mean([_mean(group) for group in rewards]),
        "reward/pass": _mean([max(group) > pass_threshold for group in rewards]),
    }


def batch_metrics(trajectories: Sequence[Trajectory], lags: Sequence[int] = ()) -> dict[str, float]:
    """Metrics of a leased batch: those of its trajectories, and what only training rollouts have.

    How many trajectories have no usable routes although routes were asked for (they take the live router), lags in
    versions, and the shares of time that trajectories waited for a runner, generated, and waited for tools.
    """
    metrics = trajectory_metrics(trajectories)
    metrics["rollout/routes_missing"] = float(sum(t.route_error is not None for t in trajectories))
    if lags:
        metrics |= {
            "policy_lag/min": float(min(lags)),
            "policy_lag/mean": _mean(lags),
            "policy_lag/max": float(max(lags)),
        }
    spent = np.array([[t.timings.queued_s, t.timings.generating_s, t.timings.tools_s] for t in trajectories])
    shares = spent.sum(axis=0) / max(float(spent.sum()), 1e-9)
    for name, share in zip(("queued", "generating", "tools"), shares, strict=True):
        metrics[f"rollout/time_{name}"] = float(share)
    return metrics


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
