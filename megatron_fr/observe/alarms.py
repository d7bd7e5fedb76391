"""Signs that a run goes wrong while its reward may still rise, told once when they appear."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

#: Updates averaged before a metric is judged, so that one odd batch raises no alarm.
WINDOW = 5


@dataclass
class _Watch:
    """One metric: ``broken(mean, reference)`` says whether its recent mean is alarming."""

    metric: str
    message: str
    broken: Callable[[float, float], bool]
    reference: Callable[[float, float], float]  # of (earlier reference, recent mean)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    best: float | None = None
    active: bool = False

    def check(self, value: float) -> str | None:
        self.recent.append(value)
        if len(self.recent) < WINDOW:
            return None
        mean = sum(self.recent) / WINDOW
        self.best = mean if self.best is None else self.reference(self.best, mean)
        was, self.active = self.active, self.broken(mean, self.best)
        return self.message.format(mean=mean, best=self.best) if self.active and not was else None


def _first(reference: float, _: float) -> float:
    return reference


class Alarms:
    """Watches tool calls, entropy, truncation, admission, the log-probability difference and routing replay."""

    def __init__(self) -> None:
        self._watches = [
            _Watch(
                "tools/calls",
                "tool calls fell to {mean:.2f} a trajectory from {best:.2f}",
                lambda mean, best: best > 0.1 and mean < best / 4,
                max,
            ),
            _Watch(
                "policy/entropy",
                "entropy fell to {mean:.3g} from {best:.3g}: the policy stops exploring",
                lambda mean, first: mean < first / 10,
                _first,
            ),
            _Watch(
                "policy/train_rollout_logprob_diff",
                "trainer and engines drift apart: log-probability difference {mean:.3g}, at first {best:.3g}",
                lambda mean, first: mean > 0.01 and mean > first * 5,
                _first,
            ),
            _Watch(
                "trust_region/admitted",
                "only {mean:.0%} of the trajectories pass the trust region",
                lambda mean, _: mean < 0.5,
                _first,
            ),
            _Watch(
                "trajectory/truncated",
                "{mean:.0%} of the trajectories are cut off",
                lambda mean, first: mean > 0.5 and mean > first + 0.1,
                _first,
            ),
            _Watch(
                "rollout/routes_missing",
                "routing replay: {mean:.1f} trajectories a batch have no usable routes and take the live router",
                lambda mean, _: mean >= 1,
                _first,
            ),
        ]

    def check(self, row: Mapping[str, float | int | bool | None]) -> list[str]:
        """Messages of the alarms that this row sets off; an alarm speaks again only after it was over."""
        messages = []
        for watch in self._watches:
            value = row.get(watch.metric)
            if value is not None and (message := watch.check(float(value))) is not None:
                messages.append(message)
        return messages
