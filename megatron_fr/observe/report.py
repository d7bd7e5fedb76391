"""Summary of a run: ``megatron-fr report RUN_DIR``."""

from __future__ import annotations

from pathlib import Path

from megatron_fr.errors import MissingExtraError
from megatron_fr.observe.metrics import METRICS_FILE, Row, held_out, read_metrics, series
from megatron_fr.observe.progress import duration

PICTURE = "run.png"

_WIDTH = 22
_SIDES = (("rollout", "generated"), ("train", "trained"))

#: Entries of a run's folder and what they hold.
_RESULTS = (
    (PICTURE, "the run in one picture"),
    (METRICS_FILE, "every metric of every update"),
    ("tensorboard", "the same for TensorBoard"),
    ("config.yaml", "the configuration as resolved"),
    ("checkpoints", "models as Hugging Face folders"),
    ("training_state", "training checkpoints; the same command goes on from the newest"),
    ("logs", "output of engines and trainer ranks"),
)


def report_run(run_dir: str | Path) -> str:
    """Summarise a finished or running run, and redraw its picture.

    Args:
        run_dir: the folder given as ``output``.

    Returns:
        The text to print, without a final newline.

    Raises:
        MegatronFRError: the folder holds no readable record.
    """
    folder = Path(run_dir)
    rows = read_metrics(folder / METRICS_FILE)
    note = _draw(folder)
    lines = [f"Run {folder.resolve().name}: {_extent(rows)}", ""]
    lines += [f"  {name:<{_WIDTH}}{text}" for name, text in _facts(rows) if text]
    lines += ["", f"Results in {folder.resolve()}:"]
    lines += [f"  {name:<{_WIDTH}}{what}" for name, what in _RESULTS if (folder / name).exists()]
    return "\n".join(lines + note)


def _draw(folder: Path) -> list[str]:
    """Draw the picture; says in one line why there is none without matplotlib."""
    try:
        from megatron_fr.observe.plot import plot_run
    except MissingExtraError as error:
        return ["", f"No {PICTURE}: {error}"]
    plot_run(folder / METRICS_FILE, folder / PICTURE)
    return []


def _extent(rows: list[Row]) -> str:
    trained = [row for row in rows if row.get("reward/mean") is not None or row.get("train/stepped") is not None]
    text = f"{len(trained)} updates"
    skipped = sum(not row["train/stepped"] for row in trained if row.get("train/stepped") is not None)
    if skipped:
        text += f", {skipped} of them without signal and without a step"
    seconds = sum(series(rows, "time/update")[1])
    return f"{text}, {duration(seconds)} of training" if seconds else text


def _facts(rows: list[Row]) -> list[tuple[str, str]]:
    rewards = held_out(rows, "reward/mean")
    updates, values = series(rows, rewards[0][1]) if rewards else ([], [])
    best = max(range(len(values)), key=values.__getitem__) if values else 0
    return [
        *((f"{label} reward", _start_end(rows, key, "{:.3f}", window=1)) for label, key in rewards),
        ("best held-out reward", f"{values[best]:.3f} at update {updates[best]}" if values else "not evaluated"),
        ("training reward", _start_end(rows, "reward/mean", "{:.3f}")),
        *(
            (f"{label} tool calls", _start_end(rows, key, "{:.2f}", window=1))
            for label, key in held_out(rows, "tools/calls")
        ),
        ("training tool calls", _start_end(rows, "tools/calls", "{:.2f}")),
        ("truncated", _start_end(rows, "trajectory/truncated", "{:.1%}")),
        ("entropy", _start_end(rows, "policy/entropy", "{:.3f}")),
        ("policy lag", _mean_and_max(rows, "policy_lag/mean", "policy_lag/max", "{:.2f}", "{:.0f}")),
        ("admitted", _mean(rows, "trust_region/admitted", "{:.2%}")),
        ("sequence KL", _mean_and_max(rows, "trust_region/seq_kl_mean", "trust_region/seq_kl_max", "{:.1e}", "{:.1e}")),
        ("log-prob. difference", _mean(rows, "policy/train_rollout_logprob_diff", "{:.1e}")),
        ("  without replay", _mean(rows, "policy/train_rollout_logprob_diff_without_replay", "{:.1e}")),
        ("  right after a sync", _mean(rows, "sync/probe_logprob_diff", "{:.1e}")),
        ("routes missing", _total(rows, "rollout/routes_missing", "trajectories took the live router")),
        ("tokens a second", _throughput(rows)),
        ("time split", _time_split(rows)),
        ("non-finite values", _total(rows, "metrics/non_finite", "recorded as null")),
    ]


def _start_end(rows: list[Row], name: str, pattern: str, window: int | None = None) -> str:
    """Mean of the first and of the last ``window`` values; a tenth of the run by default."""
    _, values = series(rows, name)
    if not values:
        return ""
    size = window or max(1, len(values) // 10)
    first, last = sum(values[:size]) / size, sum(values[-size:]) / size
    text = f"{pattern.format(first)} at the start, {pattern.format(last)} at the end"
    return text if len(values) > 1 else pattern.format(first)


def _mean(rows: list[Row], name: str, pattern: str) -> str:
    _, values = series(rows, name)
    return f"{pattern.format(sum(values) / len(values))} on average" if values else ""


def _mean_and_max(rows: list[Row], mean: str, largest: str, mean_pattern: str, max_pattern: str) -> str:
    text = _mean(rows, mean, mean_pattern)
    _, values = series(rows, largest)
    return f"{text}, largest {max_pattern.format(max(values))}" if text and values else text


def _throughput(rows: list[Row]) -> str:
    found = [(series(rows, f"{side}/tokens_per_s")[1], done) for side, done in _SIDES]
    return ", ".join(f"{sum(values) / len(values):,.0f} {done}" for values, done in found if values)


def _time_split(rows: list[Row]) -> str:
    whole = sum(series(rows, "time/update")[1])
    if not whole:
        return ""
    names = ("wait", "forward_backward", "optimizer", "sync")
    shares = {name: sum(series(rows, f"time/{name}")[1]) / whole for name in names}
    return ", ".join(f"{name.replace('_', ' and ')} {share:.0%}" for name, share in shares.items())


def _total(rows: list[Row], name: str, text: str) -> str:
    total = sum(series(rows, name)[1])
    return f"{total:.0f} {text}" if total else ""
