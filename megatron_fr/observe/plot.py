"""A run in one picture."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from megatron_fr.observe.metrics import Row, held_out, read_metrics, series

#: Okabe and Ito's palette: distinct also to colour-blind readers.
BLUE, ORANGE, GREEN, RED, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
GREY = "#6b7280"

_STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": "#374151",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.8,
    "xtick.color": "#4b5563",
    "ytick.color": "#4b5563",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}

_TIME_PARTS = (
    ("time/wait", "wait for a batch", SKY),
    ("time/forward_backward", "forward and backward", BLUE),
    ("time/optimizer", "optimizer", GREEN),
    ("time/sync", "weight sync", ORANGE),
)


def plot_run(metrics_jsonl: str | Path, png: str | Path, title: str | None = None) -> Path:
    """Draw reward, tool calls, lag, trust region, drift, lengths, entropy and time of a run.

    Args:
        metrics_jsonl: the run's record.
        png: the picture to write.
        title: the run folder's name when None.

    Returns:
        ``png`` as a path.

    Raises:
        MegatronFRError: the record is missing, empty or damaged.
    """
    rows = read_metrics(metrics_jsonl)
    panels: tuple[Callable[[Any, list[Row]], None], ...] = (
        _reward, _tools, _trust_region, _drift, _lengths, _entropy, _lag, _time
    )  # fmt: skip
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(13, 14.5), layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12))
        FigureCanvasAgg(figure)
        for axes, draw in zip(figure.subplots(4, 2, sharex=True).flat, panels, strict=True):
            draw(axes, rows)
            _finish(axes, rows)
        name = title or Path(metrics_jsonl).resolve().parent.name
        figure.suptitle(f"{name}: {_headline(rows)}", fontsize=13, fontweight="bold", x=0.01, ha="left")
        figure.savefig(png, dpi=110, facecolor="white")
    return Path(png)


def _reward(axes: Any, rows: list[Row]) -> None:
    axes.set_title("Reward")
    _smoothed(axes, rows, "reward/mean", "training batch", BLUE)
    for (label, key), color in zip(held_out(rows, "reward/mean"), cycle((RED, ORANGE, PURPLE))):
        updates, values = series(rows, key)
        if not updates:
            continue
        axes.plot(updates, values, "o--", color=color, markersize=7, linewidth=1, label=label, zorder=5)
        for i in {0, len(updates) - 1}:
            axes.annotate(
                f"{values[i]:.2f}", (updates[i], values[i]), xytext=(0, 11), textcoords="offset points", ha="center",
                color=color, fontweight="bold", zorder=6,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
            )  # fmt: skip


def _tools(axes: Any, rows: list[Row]) -> None:
    axes.set_title("Tool calls per trajectory")
    _smoothed(axes, rows, "tools/calls", "calls", BLUE)
    _smoothed(axes, rows, "tools/errors", "errors", ORANGE)
    for label, key in held_out(rows, "tools/calls"):
        updates, values = series(rows, key)
        axes.plot(updates, values, "o--", color=RED, markersize=6, linewidth=1, label=f"{label} calls", zorder=5)
    _from_zero(axes)


def _trust_region(axes: Any, rows: list[Row]) -> None:
    axes.set_title("Sequence trust region")
    _smoothed(axes, rows, "trust_region/seq_kl_mean", "KL, mean", BLUE)
    _smoothed(axes, rows, "trust_region/seq_kl_max", "KL, largest", SKY)
    _log(axes, rows, "trust_region/seq_kl_mean", "trust_region/seq_kl_max")
    axes.set_ylabel("nats a token")
    _share(axes, rows, "trust_region/admitted", "admitted", GREEN)


def _drift(axes: Any, rows: list[Row]) -> None:
    axes.set_title("Log-probability difference, trainer against engines")
    _smoothed(axes, rows, "policy/train_rollout_logprob_diff", "training batch", BLUE)
    updates, values = series(rows, "policy/train_rollout_logprob_diff_without_replay")
    if updates:
        axes.plot(
            updates, values, "o--", color=RED, markersize=5, linewidth=1, label="without routing replay", zorder=5
        )
    _smoothed(axes, rows, "sync/probe_logprob_diff", "right after a sync", ORANGE)
    _log(
        axes,
        rows,
        "policy/train_rollout_logprob_diff",
        "policy/train_rollout_logprob_diff_without_replay",
        "sync/probe_logprob_diff",
    )
    axes.set_ylabel("mean |difference|, nats")


def _lengths(axes: Any, rows: list[Row]) -> None:
    axes.set_title("Length and truncation")
    updates, middle = series(rows, "trajectory/tokens_p50")
    high_updates, high = series(rows, "trajectory/tokens_p99")
    if updates:
        axes.plot(updates, middle, color=BLUE, label="tokens, median")
    if high_updates:
        axes.plot(high_updates, high, color=SKY, linewidth=1, label="tokens, 99th percentile")
    if updates and updates == high_updates:
        axes.fill_between(updates, middle, high, color=SKY, alpha=0.2, linewidth=0)
    _from_zero(axes)
    axes.set_ylabel("tokens")
    _share(axes, rows, "trajectory/truncated", "truncated", RED)


def _entropy(axes: Any, rows: list[Row]) -> None:
    axes.set_title("Policy entropy")
    _smoothed(axes, rows, "policy/entropy", "mean over action tokens", BLUE)
    _from_zero(axes)
    axes.set_ylabel("nats")


def _lag(axes: Any, rows: list[Row]) -> None:
    axes.set_title("Policy lag")
    low_updates, low = series(rows, "policy_lag/min")
    high_updates, high = series(rows, "policy_lag/max")
    if low_updates and low_updates == high_updates:
        axes.fill_between(
            low_updates, low, high, color=SKY, alpha=0.3, linewidth=0, step="mid", label="smallest to largest"
        )
    _smoothed(axes, rows, "policy_lag/mean", "mean", BLUE)
    _from_zero(axes)
    axes.set_ylabel("updates")


def _time(axes: Any, rows: list[Row]) -> None:
    axes.set_title("Where an update's time goes")
    shown = [part for part in _TIME_PARTS if series(rows, part[0])[0]]
    if shown:
        updates = [int(row["update"] or 0) for row in rows if any(row.get(name) is not None for name, _, _ in shown)]
        by_update = {int(row["update"] or 0): row for row in rows}
        stacks = [_trailing([float(by_update[u].get(name) or 0) for u in updates]) for name, _, _ in shown]
        axes.stackplot(
            updates, stacks, labels=[label for _, label, _ in shown], colors=[c for _, _, c in shown], alpha=0.85
        )
    axes.set_ylabel("seconds")
    _from_zero(axes)


def _smoothed(axes: Any, rows: list[Row], name: str, label: str, color: str) -> None:
    """The raw values faintly, their trailing mean clearly."""
    updates, values = series(rows, name)
    if not updates:
        return
    smooth = _trailing(values)
    if smooth != values:
        axes.plot(updates, values, color=color, alpha=0.25, linewidth=0.9)
    axes.plot(updates, smooth, color=color, linewidth=1.8, label=label, marker="o" if len(updates) == 1 else None)


def _trailing(values: list[float]) -> list[float]:
    """Mean over the last twentieth of the run (one update: as is)."""
    window = max(1, len(values) // 20)
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i + 1 - window) : i + 1])]


def _share(axes: Any, rows: list[Row], name: str, label: str, color: str) -> None:
    """A percentage on the right-hand scale."""
    updates, values = series(rows, name)
    if not updates:
        return
    right = axes.twinx()
    right.plot(updates, _trailing(values), color=color, linewidth=1.6, label=label)
    right.set_ylim(-0.03, 1.03)
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    right.set_ylabel(label, color=color)
    right.tick_params(axis="y", colors=color)
    right.spines["right"].set_visible(True)
    right.grid(False)
    axes.share_axes = right


def _log(axes: Any, rows: list[Row], *names: str) -> None:
    """A logarithmic scale where there is something to show on it."""
    if any(value > 0 for name in names for value in series(rows, name)[1]):
        axes.set_yscale("log")


def _from_zero(axes: Any) -> None:
    axes.set_ylim(bottom=0)


def _finish(axes: Any, rows: list[Row]) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(length=0, labelbottom=True)
    axes.set_xlabel("update")
    handles, labels = axes.get_legend_handles_labels()
    extra = getattr(axes, "share_axes", None)
    if extra is not None:
        more = extra.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    if handles:
        axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(-0.01, 0.98), ncols=4, borderaxespad=0.1)
        axes.set_title(axes.get_title(loc="left"), pad=22, loc="left")
    else:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color=GREY)


def _headline(rows: list[Row]) -> str:
    text = f"{int(rows[-1]['update'] or 0)} updates"
    for label, key in held_out(rows, "reward/mean")[:1]:
        _, values = series(rows, key)
        if len(values) > 1:
            text += f", {label} reward {values[0]:.2f} → {values[-1]:.2f}"
    return text
