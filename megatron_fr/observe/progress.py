"""Live progress: one plain line an update, readable in a terminal and in a Slurm log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from megatron_fr.observe.alarms import Alarms
from megatron_fr.observe.metrics import held_out

Metrics = Mapping[str, float | int | bool | None]


class Progress:
    """Prints a line for each update, and alarms as they appear.

    Args:
        total_updates: the N of "update k/N".
        stream: target of the lines; standard output by default.
        clock: monotonic time in seconds.
    """

    def __init__(
        self, total_updates: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total_updates = total_updates
        self._stream = stream
        self._clock = clock
        self._started: tuple[int, float] | None = None  # first update of this process, and when it ended
        self._alarms = Alarms()

    def update(self, row: Metrics) -> None:
        """Print the line of one update, and new alarms below it."""
        for line in (self.line(row), *(f"  ! {message}" for message in self._alarms.check(row))):
            print(line, file=self._stream or sys.stdout, flush=True)

    def line(self, row: Metrics) -> str:
        """Text of the line; a metric that is missing or not finite shows as ``-``."""
        number = int(row["update"] or 0)
        width = len(str(self.total_updates))

        def show(name: str, pattern: str) -> str:
            value = row.get(name)
            return "-" if value is None else pattern.format(float(value))

        generated, trained = (_count(row.get(f"{side}/tokens_per_s")) for side in ("rollout", "train"))
        head = f"update {number:>{width}}/{self.total_updates}"
        rewards = held_out([row], "reward/mean")
        evaluated = [f"{label} reward {show(key, '{:.3f}')}" for label, key in rewards if row[key] is not None]
        if number == 0:  # before the first batch
            return " | ".join(
                [head, f"first sync: logprob diff {show('sync/probe_logprob_diff', '{:.1e}')}", *evaluated]
            )
        without_replay = ""
        if row.get("policy/train_rollout_logprob_diff_without_replay") is not None:
            without_replay = f" ({show('policy/train_rollout_logprob_diff_without_replay', '{:.1e}')} without replay)"
        parts = [
            head,
            f"reward {show('reward/mean', '{:.3f}')}",
            f"tool calls {show('tools/calls', '{:.2f}')}",
            f"lag {show('policy_lag/mean', '{:.1f}')} (max {show('policy_lag/max', '{:.0f}')})",
            f"admitted {show('trust_region/admitted', '{:.1%}')}",
            f"KL {show('trust_region/seq_kl_mean', '{:.1e}')}",
            f"logprob diff {show('policy/train_rollout_logprob_diff', '{:.1e}')}{without_replay}",
            f"tokens/s {generated} generated, {trained} trained",
            f"{show('time/update', '{:.1f}')} s",
            f"{self._left(number)} left",
        ]
        if row.get("train/stepped") is not None and not row["train/stepped"]:
            parts.append("no signal, no step")
        return " | ".join([*parts, *evaluated])

    def _left(self, number: int) -> str:
        """Time left, from the mean duration of this process's updates with their evaluations."""
        now = self._clock()
        if self._started is None or number <= self._started[0]:
            self._started = (number, now)
            return "-" if number < self.total_updates else "0 s"
        first, since = self._started
        return duration((now - since) / (number - first) * max(self.total_updates - number, 0))


def duration(seconds: float) -> str:
    """``48 s``, ``12 min``, ``3 h 05 min``, ``2 d 4 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24} h"


def _count(value: float | int | bool | None) -> str:
    if value is None:
        return "-"
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"
