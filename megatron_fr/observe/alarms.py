"""Signs that a run goes wrong while its reward may still rise, reported once when they appear."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

#: Updates averaged before a metric is judged, so that one odd batch raises no alarm.
WINDOW = 5


@dataclass
class _Watch:
    """One metric: ``is_bad(mean, reference)`` judges its recent mean against the first one (or the highest)."""

    metric: str
    message: str
    is_bad: Callable[[float, float], bool]
    against_highest: bool = False
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    reference: float | None = None
    active: bool = False

    def check(self, value: float) -> str | None:
        self.recent.append(value)
        if len(self.recent) < WINDOW:
            return None
        mean = sum(self.recent) / WINDOW
        if self.reference is None or (self.against_highest and mean > self.reference):
            self.reference = mean
        was_active, self.active = self.active, self.is_bad(mean, self.reference)
        return self.message.format(mean=mean, first=self.reference) if self.active and not was_active else None


class Alarms:
    """Watches tool calls, entropy, truncation, admission, the log-probability difference and routing replay."""

    def __init__(self) -> None:
        self._watches = [
            _Watch(
                "tools/calls", "tool calls fell to {mean:.2f} a trajectory from {first:.2f}",
                lambda mean, best: best > 0.1 and mean < best / 4, against_highest=True,
            ),
            _Watch(
                "policy/entropy", "entropy fell to {mean:.3g} from {first:.3g}: the policy stops exploring",
                lambda mean, first: mean < first / 10,
            ),
            _Watch(
                "policy/train_rollout_logprob_diff",
                "trainer and engines drift apart: log-probability difference {mean:.3g}, at first {first:.3g}",
                lambda mean, first: mean > 0.01 and mean > first * 5,
            ),
            _Watch(
                "trust_region/admitted", "only {mean:.0%} of the trajectories pass the trust region",
                lambda mean, _: mean < 0.5,
            ),
            _Watch(
                "trajectory/truncated", "{mean:.0%} of the trajectories are cut off",
                lambda mean, first: mean > 0.5 and mean > first + 0.1,
            ),
            _Watch(
                "rollout/routes_missing",
                "routing replay: {mean:.1f} trajectories a batch have no usable routes and take the live router",
                lambda mean, _: mean >= 1,
            ),
        ]  # fmt: skip

    def check(self, row: Mapping[str, float | int | bool | None]) -> list[str]:
        """Messages of the alarms that this row sets off; an alarm repeats only after it was over."""
        given = [(watch, value) for watch in self._watches if (value := row.get(watch.metric)) is not None]
        return [message for watch, value in given if (message := watch.check(float(value))) is not None]
