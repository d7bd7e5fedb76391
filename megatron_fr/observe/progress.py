"""Live progress: one plain line an update, readable in a terminal and in a Slurm log, and alarms below it."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from megatron_fr.observe.failures import FAILURES_FILE, commonest, read_failures
from megatron_fr.observe.metrics import Row, held_out

#: Updates averaged before a metric is judged, so that one odd batch raises no alarm.
WINDOW = 5
#: Updates without cause after which an alarm is said again: a metric may hover at its threshold.
_CALM = 20


class Progress:
    """Prints a line for each of ``total`` updates to ``stream`` (None: standard output), and alarms as they appear.

    ``clock`` gives monotonic time in seconds; ``folder`` is the run's, whose list of failed prompts gives reasons.
    """

    def __init__(
        self,
        total: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        folder: Path | None = None,
    ) -> None:
        self._total, self._stream, self._clock, self._folder = total, stream, clock, folder
        self._started: tuple[int, float] | None = None  # first update of this process, and when it ended
        self._alarms = Alarms()
        self._failed = 0  # prompts set aside when that was last said; twice as many are said again

    def update(self, row: Row) -> None:
        """Print the line of one update, and new alarms below it."""
        alarms = [f"  ! {message}" for message in self._alarms.check(row)]
        if (failed := int(row.get("rollout/failed_prompts") or 0)) >= max(1, 2 * self._failed):
            reasons = list(read_failures(self._folder).values()) if self._folder is not None else []
            named = f"; the commonest reason: {commonest(reasons)}" if reasons else ""
            alarms.append(f"  ! {failed} prompts failed and are set aside ({FAILURES_FILE}){named}")
            self._failed = failed
        for line in (self.line(row), *alarms):
            print(line, file=self._stream or sys.stdout, flush=True)

    def line(self, row: Row) -> str:
        """Make the text of the line; a metric that is missing or not finite shows as ``-``."""

        def show(name: str, pattern: str, missing: str = "-") -> str:
            value = row.get(name)
            return missing if value is None else pattern.format(float(value))

        number = int(row["update"] or 0)
        head = f"update {number:>{len(str(self._total))}}/{self._total}"
        rewards = held_out([row], "reward/mean")
        evaluated = [f"{label} reward {show(key, '{:.3f}')}" for label, key in rewards if row[key] is not None]
        if number == 0:  # before the first batch
            first = f"first sync: logprob diff {show('sync/probe_logprob_diff', '{:.1e}')}"
            return " | ".join([head, first, *evaluated])
        generated, trained = (_count(row.get(f"{side}/tokens_per_s")) for side in ("rollout", "train"))
        without_replay = show("policy/train_rollout_logprob_diff_without_replay", " ({:.1e} without replay)", "")
        parts = [
            head,
            f"reward {show('reward/mean', '{:.3f}')}",
            f"tool calls {show('tools/calls', '{:.2f}')}",
            f"lag {show('policy_lag/mean', '{:.1f}')} (max {show('policy_lag/max', '{:.0f}')})",
            show("trust_region/admitted", "admitted {:.1%}", "")
            or show("trust_region/admitted_tokens", "admitted tokens {:.1%}", "")
            or show("policy/clipped", "clipped {:.1%}", "admitted -"),
            f"KL {show('trust_region/seq_kl_mean', '{:.1e}')}",
            f"logprob diff {show('policy/train_rollout_logprob_diff', '{:.1e}')}{without_replay}",
            f"tokens/s {generated} generated, {trained} trained",
            f"{show('time/update', '{:.1f}')} s",
            f"{self._left(number)} left",
        ]
        skipped = ["no signal, no step"] if row.get("train/stepped") == 0 else []
        if row.get("rollout/failure_rate"):
            skipped.append(f"failing prompts {show('rollout/failure_rate', '{:.1%}')}")
        return " | ".join([*parts, *skipped, *evaluated])

    def _left(self, number: int) -> str:
        """Estimate the time left from the mean duration of this process's updates with their evaluations."""
        now = self._clock()
        if self._started is None or number <= self._started[0]:
            self._started = (number, now)
            return "-" if number < self._total else "0 s"
        first, since = self._started
        return duration((now - since) / (number - first) * max(self._total - number, 0))


def duration(seconds: float) -> str:
    """Format as ``48 s``, ``12 min``, ``3 h 05 min`` or ``2 d 4 h``."""
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
    if value >= 1e6:
        return f"{value / 1e6:.1f}M"
    return f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"


@dataclass
class _Watch:
    """``is_bad(mean, reference)`` judges the metric's recent mean against its first one, or the highest."""

    metric: str
    message: str
    is_bad: Callable[[float, float], bool]
    against_highest: bool = False
    unless: str = ""  # a metric of the same row that says more
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    reference: float | None = None
    calm: int = _CALM  # updates without cause since the last one with cause

    def check(self, value: float) -> str | None:
        self.recent.append(value)
        if len(self.recent) < WINDOW:
            return None
        mean = sum(self.recent) / WINDOW
        if self.reference is None or (self.against_highest and mean > self.reference):
            self.reference = mean
        if not self.is_bad(mean, self.reference):
            self.calm += 1
            return None
        was_calm, self.calm = self.calm >= _CALM, 0
        return self.message.format(mean=mean, first=self.reference) if was_calm else None


class Alarms:
    """Watches for signs that a run goes wrong while its reward may still rise."""

    def __init__(self) -> None:
        self._watches = [
            _Watch("tools/calls", "tool calls fell to {mean:.2f} a trajectory from {first:.2f}",
                   lambda mean, best: best > 0.1 and mean < best / 4, against_highest=True),
            _Watch("tools/refused_total", "the tool sandbox fails to run calls: {mean:.0f} yet; see logs/rollout.log",
                   lambda mean, first: mean > first),
            _Watch("policy/entropy", "entropy fell to {mean:.3g} from {first:.3g}: the policy stops exploring",
                   lambda mean, first: mean < first / 10),
            _Watch("policy/train_rollout_logprob_diff",
                   "trainer and engines drift apart: log-probability difference {mean:.3g}, at first {first:.3g}",
                   lambda mean, first: mean > 0.01 and mean > first * 5),
            _Watch("trust_region/admitted", "only {mean:.0%} of the trajectories pass the trust region",
                   lambda mean, _: mean < 0.5),
            _Watch("trust_region/admitted_tokens", "only {mean:.0%} of the tokens pass the trust region",
                   lambda mean, _: mean < 0.5, unless="trust_region/admitted"),
            _Watch("trajectory/truncated", "{mean:.0%} of the trajectories are cut off",
                   lambda mean, first: mean > 0.5 and mean > first + 0.1),
            _Watch("rollout/routes_missing",
                   "routing replay: {mean:.1f} trajectories a batch have no usable routes and take the live router",
                   lambda mean, _: mean >= 1),
            _Watch("rollout/failure_rate", "{mean:.0%} of the prompts fail for good, and are missing from training",
                   lambda mean, _: mean > 0.1),
            _Watch("rollout/event_loop_delay_ms",
                   "code that blocks the event loop holds up every trajectory, for {mean:.0f} ms at a time; "
                   "logs/rollout.log names its place", lambda mean, _: mean > 1000),
        ]  # fmt: skip

    def check(self, row: Row) -> list[str]:
        """Make the messages of the alarms that this row sets off; an alarm repeats only after it was over."""
        watches = [watch for watch in self._watches if watch.unless not in row]
        given = [(watch, value) for watch in watches if (value := row.get(watch.metric)) is not None]
        return [message for watch, value in given if (message := watch.check(float(value))) is not None]
