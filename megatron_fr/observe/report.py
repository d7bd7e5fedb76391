"""Summary of a run: ``megatron-fr report RUN_DIR``."""

from __future__ import annotations

from pathlib import Path

from megatron_fr.errors import MissingExtraError
from megatron_fr.observe.failures import FAILURES_FILE, commonest, read_failures
from megatron_fr.observe.metrics import METRICS_FILE, Row, held_out, read_metrics, series
from megatron_fr.observe.progress import duration

PICTURE = "run.png"

#: Entries of a run's folder and what they hold.
_RESULTS = (
    (PICTURE, "the run in one picture"),
    (METRICS_FILE, "every metric of every update"),
    ("tensorboard", "the same for TensorBoard"),
    ("config.yaml", "the configuration as resolved"),
    ("checkpoints", "models as Hugging Face folders"),
    ("training_state", "training checkpoints; the same command goes on from the newest"),
    (FAILURES_FILE, "prompts that failed and were set aside, with the reason of each"),
    ("logs", "output of engines and trainer ranks"),
)


#: Parts of a run's time, in which every second counts once.
_TIMES = (
    *("wait", "forward_backward", "optimizer", "sync", "probe", "replay_check", "other"),
    *("evaluation", "checkpoint"),
)


def report_run(run_dir: str | Path) -> str:
    """Redraw the picture of a finished or running run, and return its summary, without a final newline.

    Raises:
        MegatronFRError: the folder holds no readable record.
    """
    folder, note = Path(run_dir), []
    rows = read_metrics(folder / METRICS_FILE)
    try:
        from megatron_fr.observe.plot import plot_run

        plot_run(folder / METRICS_FILE, folder / PICTURE)
    except MissingExtraError as error:
        note = ["", f"No {PICTURE}: {error}"]
    except OSError as error:  # the disk is full, or not ours to write
        (folder / PICTURE).unlink(missing_ok=True)  # it is cut off
        note = ["", f"No {PICTURE}: {error.strerror or error}"]
    lines = [f"Run {folder.resolve().name}: {_extent(rows)}", ""]
    failures = read_failures(folder)
    rate = _start_end(rows, "rollout/failure_rate", "{:.1%}")
    what = ", ".join(filter(None, [f"{len(failures)} set aside", rate]))
    failed = f"{what}: {commonest(failures.values(), 5)}" if failures else ""
    lines += [f"  {name:<22}{text}" for name, text in [*_facts(rows), ("failed prompts", failed)] if text]
    lines += ["", f"Results in {folder.resolve()}:"]
    lines += [f"  {name:<22}{what}" for name, what in _RESULTS if (folder / name).exists()]
    return "\n".join(lines + note)


def _extent(rows: list[Row]) -> str:
    trained = [row for row in rows if row.get("reward/mean") is not None or row.get("train/stepped") is not None]
    text = f"{len(trained)} updates"
    if skipped := sum(row.get("train/stepped") == 0 for row in trained):
        text += f", {skipped} of them without signal and without a step"
    seconds = sum(series(rows, "time/update")[1])
    return f"{text}, {duration(seconds)} of training" if seconds else text


def _facts(rows: list[Row]) -> list[tuple[str, str]]:
    rewards = held_out(rows, "reward/mean")
    updates, values = series(rows, rewards[0][1]) if rewards else ([], [])
    best = max(range(len(values)), key=values.__getitem__) if values else 0
    return [
        *((f"{name} reward", _start_end(rows, key, "{:.3f}", 1)) for name, key in rewards),
        ("best held-out reward", f"{values[best]:.3f} at update {updates[best]}" if values else "not evaluated"),
        ("training reward", _start_end(rows, "reward/mean", "{:.3f}")),
        *((f"{name} tool calls", _start_end(rows, key, "{:.2f}", 1)) for name, key in held_out(rows, "tools/calls")),
        ("training tool calls", _start_end(rows, "tools/calls", "{:.2f}")),
        ("truncated", _start_end(rows, "trajectory/truncated", "{:.1%}")),
        ("entropy", _start_end(rows, "policy/entropy", "{:.3f}")),
        ("policy lag", _mean(rows, "policy_lag/mean", "{:.2f}", "policy_lag/max", "{:.0f}")),
        _gate(rows),
        ("sequence KL", _mean(rows, "trust_region/seq_kl_mean", "{:.1e}", "trust_region/seq_kl_max", "{:.1e}")),
        ("log-prob. difference", _mean(rows, "policy/train_rollout_logprob_diff", "{:.1e}")),
        ("  without replay", _mean(rows, "policy/train_rollout_logprob_diff_without_replay", "{:.1e}")),
        ("  right after a sync", _mean(rows, "sync/probe_logprob_diff", "{:.1e}")),
        ("routes missing", _total(rows, "rollout/routes_missing", "trajectories took the live router")),
        ("tokens a second", _throughput(rows)),
        ("time split", _time_split(rows)),
        ("non-finite values", _total(rows, "metrics/non_finite", "recorded as null")),
    ]


def _start_end(rows: list[Row], name: str, pattern: str, window: int | None = None) -> str:
    """Format the mean of the first and of the last ``window`` values; a tenth of the run by default."""
    _, values = series(rows, name)
    if len(values) < 2:
        return pattern.format(*values) if values else ""
    size = window or max(1, len(values) // 10)
    first, last = sum(values[:size]) / size, sum(values[-size:]) / size
    return f"{pattern.format(first)} at the start, {pattern.format(last)} at the end"


def _mean(rows: list[Row], name: str, pattern: str, largest: str = "", largest_pattern: str = "") -> str:
    (_, values), (_, others) = series(rows, name), series(rows, largest)
    if not values:
        return ""
    text = f"{pattern.format(sum(values) / len(values))} on average"
    return f"{text}, largest {largest_pattern.format(max(others))}" if others else text


def _throughput(rows: list[Row]) -> str:
    sides = (("rollout", "generated"), ("train", "trained"))
    found = [(series(rows, f"{side}/tokens_per_s")[1], done) for side, done in sides]
    return ", ".join(f"{sum(values) / len(values):,.0f} {done}" for values, done in found if values)


def _gate(rows: list[Row]) -> tuple[str, str]:
    """What the algorithm leaves out: trajectories, tokens, or a clip's tokens."""
    for label, name in (("admitted", "trust_region/admitted"), ("admitted tokens", "trust_region/admitted_tokens")):
        if text := _mean(rows, name, "{:.2%}"):
            return label, text
    return "clipped tokens", _mean(rows, "policy/clipped", "{:.2%}")


def _time_split(rows: list[Row]) -> str:
    seconds = {name: sum(series(rows, f"time/{name}")[1]) for name in _TIMES}
    whole = sum(seconds.values())
    return ", ".join(f"{name.replace('_', ' and ')} {s / whole:.0%}" for name, s in seconds.items() if s)


def _total(rows: list[Row], name: str, text: str) -> str:
    return f"{total:.0f} {text}" if (total := sum(series(rows, name)[1])) else ""
