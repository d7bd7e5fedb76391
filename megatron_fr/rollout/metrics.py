"""What the rollout side measures, by the names that are written and plotted, alike in training and evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_fr.trajectory import Trajectory


def trajectory_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Averages of at least one trajectory; a named part of the reward is averaged over those that have it."""
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
    """:func:`trajectory_metrics` of a leased batch, and what only training rollouts have.

    A trajectory whose routes were asked for and are missing takes the live router. Lags count versions.
    """
    metrics = trajectory_metrics(trajectories)
    metrics["rollout/routes_missing"] = float(sum(t.route_error is not None for t in trajectories))
    if lags:
        least, most = float(min(lags)), float(max(lags))
        metrics |= {"policy_lag/min": least, "policy_lag/mean": _mean(lags), "policy_lag/max": most}
    spent = np.array([[t.timings.queued_s, t.timings.generating_s, t.timings.tools_s] for t in trajectories])
    shares = spent.sum(axis=0) / max(float(spent.sum()), 1e-9)
    names = ("rollout/time_queued", "rollout/time_generating", "rollout/time_tools")
    return metrics | dict(zip(names, shares.tolist(), strict=True))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
