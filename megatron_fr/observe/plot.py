"""A run in one picture."""

from __future__ import annotations

import warnings
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_fr.errors import needs_extra
from megatron_fr.observe.metrics import Row, held_out, read_metrics, series

with needs_extra("plot"):
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator, PercentFormatter

#: Okabe and Ito's palette, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, RED, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"

_STYLE = {
    "font.size": 9.5, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#9ca3af", "axes.labelcolor": "#374151",
    "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e5e7eb", "grid.linewidth": 0.8,
    "xtick.color": "#4b5563", "ytick.color": "#4b5563", "legend.frameon": False, "legend.fontsize": 8.5,
}  # fmt: skip
_NUMBER = {
    "xytext": (0, 11), "textcoords": "offset points", "ha": "center",
    "bbox": {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
}  # fmt: skip


class Curve(NamedTuple):
    """One metric of a panel.

    ``mean`` draws values and their trailing mean, ``points`` single measurements, ``share`` a percentage on the
    right-hand scale, and ``area`` stacks on the areas before it.
    """

    metric: str
    label: str
    color: str
    kind: Literal["mean", "points", "share", "area"] = "mean"


class Panel(NamedTuple):
    """One diagram; ``band`` names the metrics between which it is shaded."""

    title: str
    curves: tuple[Curve, ...]
    unit: str = ""
    scale: Literal["linear", "zero", "log"] = "linear"
    band: tuple[str, str] | None = None


_DIFFERENCE = "policy/train_rollout_logprob_diff"

PANELS = (
    Panel("Reward", (
        Curve("reward/mean", "training batch", BLUE), Curve("eval/reward/mean", "held-out", RED, "points"),
    )),
    Panel("Tool calls per trajectory", (
        Curve("tools/calls", "calls", BLUE), Curve("tools/errors", "errors", ORANGE),
        Curve("eval/tools/calls", "held-out calls", RED, "points"),
    ), scale="zero"),
    Panel("Sequence trust region", (
        Curve("trust_region/seq_kl_mean", "KL, mean", BLUE), Curve("trust_region/seq_kl_max", "KL, largest", SKY),
        Curve("trust_region/admitted", "admitted", GREEN, "share"),
    ), "nats a token", "log"),
    Panel("Log-probability difference, trainer against engines", (
        Curve(_DIFFERENCE, "training batch", BLUE),
        Curve(f"{_DIFFERENCE}_without_replay", "without routing replay", RED, "points"),
        Curve("sync/probe_logprob_diff", "right after a sync", ORANGE),
    ), "mean |difference|, nats", "log"),
    Panel("Length and truncation", (
        Curve("trajectory/tokens_p50", "tokens, median", BLUE), Curve("trajectory/tokens_p99", "99th percentile", SKY),
        Curve("trajectory/truncated", "truncated", RED, "share"),
    ), "tokens", "zero", ("trajectory/tokens_p50", "trajectory/tokens_p99")),
    Panel("Policy entropy", (Curve("policy/entropy", "mean over action tokens", BLUE),), "nats", "zero"),
    Panel("Policy lag", (
        Curve("policy_lag/mean", "mean", BLUE),
    ), "updates", "zero", ("policy_lag/min", "policy_lag/max")),
    Panel("Where an update's time goes", (
        Curve("time/wait", "wait for a batch", SKY, "area"),
        Curve("time/forward_backward", "forward and backward", BLUE, "area"),
        Curve("time/optimizer", "optimizer", GREEN, "area"), Curve("time/sync", "weight sync", ORANGE, "area"),
    ), "seconds", "zero"),
)  # fmt: skip


def plot_run(metrics_jsonl: str | Path, png: str | Path) -> Path:
    """Draw the panels of a run's record into ``png``, and return its path.

    Raises:
        MegatronFRError: the record is missing, empty or damaged.
    """
    rows = read_metrics(metrics_jsonl)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(13, 14.5), layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12))
        FigureCanvasAgg(figure)
        for axes, panel in zip(figure.subplots(4, 2, sharex=True).flat, PANELS, strict=True):
            draw(axes, panel, rows)
        title = f"{Path(metrics_jsonl).resolve().parent.name}: {_headline(rows)}"
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph", UserWarning)  # the run's name may be in any alphabet
            figure.savefig(png, dpi=110, facecolor="white")
    return Path(png)


def draw(axes: Any, panel: Panel, rows: list[Row]) -> None:
    """Draw one panel; metrics that were not recorded are left out."""
    axes.set_ylabel(panel.unit)
    handles: list[Any] = []
    if panel.band is not None:
        (updates, low), (others, high) = (series(rows, name) for name in panel.band)
        if updates and updates == others:
            axes.fill_between(updates, low, high, color=SKY, alpha=0.25, linewidth=0)
    below: list[float] = []
    for curve in (found for listed in panel.curves for found in by_set(listed, rows)):
        updates, values = series(rows, curve.metric)
        if not updates:
            continue
        if curve.kind == "points":
            handles += axes.plot(updates, values, "o--", color=curve.color, markersize=6, label=curve.label)
            for i in {0, len(updates) - 1} if curve.metric.endswith("/reward/mean") else set():
                point = updates[i], values[i]
                axes.annotate(f"{values[i]:.2f}", point, color=curve.color, fontweight="bold", **_NUMBER)
        elif curve.kind == "share":
            handles += _draw_share(axes, curve, updates, values)
        elif curve.kind == "area":
            below = below if len(below) == len(updates) else [0.0] * len(updates)
            above = [a + b for a, b in zip(below, trailing_mean(values), strict=True)]
            handles.append(axes.fill_between(updates, below, above, color=curve.color, alpha=0.85, label=curve.label))
            below = above
        else:
            axes.plot(updates, values, color=curve.color, alpha=0.25, linewidth=0.9)
            style = {"color": curve.color, "label": curve.label, "marker": "o" if len(updates) == 1 else None}
            handles += axes.plot(updates, trailing_mean(values), linewidth=1.8, **style)
    left = [series(rows, curve.metric)[1] for curve in panel.curves if curve.kind != "share"]
    if panel.scale == "log" and any(value > 0 for values in left for value in values):
        axes.set_yscale("log")
    elif panel.scale == "zero":
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(length=0, labelbottom=True)
    axes.set_xlabel("update")
    axes.set_title(panel.title, pad=22 if handles else None)
    if handles:
        axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.01, 0.98), ncols=4, borderaxespad=0.1)
    else:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color="#6b7280")


def by_set(curve: Curve, rows: list[Row]) -> list[Curve]:
    """List the curve once, and one of a held-out metric once for each evaluation set."""
    if not curve.metric.startswith("eval/"):
        return [curve]
    found = zip(held_out(rows, curve.metric.removeprefix("eval/")), cycle((RED, PURPLE, ORANGE)))
    return [Curve(key, curve.label.replace("held-out", label), color, curve.kind) for (label, key), color in found]


def trailing_mean(values: list[float]) -> list[float]:
    """Average each value with those before it, over a twentieth of the run in all."""
    window = max(1, len(values) // 20)
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i + 1 - window) : i + 1])]


def _draw_share(axes: Any, curve: Curve, updates: list[int], values: list[float]) -> list[Any]:
    right = axes.twinx()
    right.set_ylim(-0.03, 1.03)
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    right.set_ylabel(curve.label, color=curve.color)
    right.tick_params(axis="y", colors=curve.color)
    right.spines["right"].set_visible(True)
    right.grid(False)
    return list(right.plot(updates, trailing_mean(values), color=curve.color, linewidth=1.6, label=curve.label))


def _headline(rows: list[Row]) -> str:
    text = f"{int(rows[-1]['update'] or 0)} updates"
    for label, key in held_out(rows, "reward/mean")[:1]:
        if len(values := series(rows, key)[1]) > 1:
            text += f", {label} reward {values[0]:.2f} → {values[-1]:.2f}"
    return text
