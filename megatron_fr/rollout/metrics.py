"""Averages over one leased batch, by the names under which they are written and plotted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_fr.trajectory import Trajectory


def batch_metrics(trajectories: Sequence[Trajectory], lags: Sequence[int] = ()) -> dict[str, float]:
    """Metrics of at least one trajectory.

    Rewards and their parts, tool use, truncation, lengths (``N`` and action tokens), how many trajectories have no
    usable routes although routes were asked for (they take the live router), lags in versions, and the shares of time
    that trajectories waited for a runner, generated, and waited for tools.
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
        "rollout/routes_missing": float(sum(t.route_error is not None for t in trajectories)),
    }
    for part in sorted({name for t in trajectories for name in t.reward_parts} - {"reward", "mean"}):
        values = [t.reward_parts[part] for t in trajectories if part in t.reward_parts]
        metrics[f"reward/{part}"] = _mean(values)
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
