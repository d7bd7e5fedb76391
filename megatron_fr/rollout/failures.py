"""Prompts that cannot be played: set aside one by one, and the end of the run where they are too many."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path

from megatron_fr.errors import AgentTimeoutError, PromptTooLongError, RolloutEnded
from megatron_fr.observe.failures import FAILURES_FILE, append_failures, commonest

log = logging.getLogger(__name__)

#: Attempts of one member of a group (or of a single rollout) before its prompt is given up.
MAX_ATTEMPTS = 3
#: Distinct prompts that the failure rate is taken over, the last ones.
WINDOW = 256
#: Distinct prompts before the rate is judged, and before a run in which every one failed ends.
ENOUGH, ALL_FAILED = 32, 8


def worth_retrying(error: Exception) -> bool:
    """Whether another attempt may go better: no prompt gets shorter, and a hanging agent has cost enough time."""
    return not isinstance(error, PromptTooLongError | AgentTimeoutError)


class FailedPrompts:
    """The prompts that failed for good, which are not played again, and their share among the last distinct ones.

    Args:
        max_rate: share above which the run ends.
        prompts: number of distinct prompts that there are.
        folder: of the run, where the failed prompts are listed; None: nowhere.

    Attributes:
        reasons: the last reason for each prompt id.
    """

    def __init__(self, max_rate: float, prompts: int, folder: Path | None = None) -> None:
        self._max_rate, self._prompts, self._folder = max_rate, prompts, folder
        self._recent: dict[str, str | None] = {}  # the reason, None where the prompt went well; the oldest first
        self.reasons: dict[str, str] = {}

    @property
    def rate(self) -> float:
        """Share of the last distinct prompts that failed."""
        return sum(reason is not None for reason in self._recent.values()) / max(1, len(self._recent))

    def restore(self, reasons: Mapping[str, str]) -> None:
        """Go on with what an earlier run set aside, or anew with nothing."""
        self.reasons.clear()
        self.reasons.update(reasons)
        if self._folder is not None:
            (self._folder / FAILURES_FILE).unlink(missing_ok=True)
            if reasons:
                append_failures(self._folder, reasons)

    def succeeded(self, prompt_id: str) -> None:
        self._note(prompt_id, None)

    def failed(self, prompt_id: str, reason: str) -> None:
        """Set a prompt aside.

        Raises:
            RolloutEnded: too many of the last prompts failed; carries the commonest reason.
        """
        self.reasons[prompt_id] = reason
        log.warning("prompt %r is set aside (%d so far): %s", prompt_id, len(self.reasons), reason)
        if self._folder is not None:
            with contextlib.suppress(OSError):  # the log has it, and a full disk ends the run elsewhere
                append_failures(self._folder, {prompt_id: reason})
        self._note(prompt_id, reason)
        failures = [why for why in self._recent.values() if why is not None]
        seen = len(self._recent)
        if self.rate > self._max_rate and seen >= min(ALL_FAILED if len(failures) == seen else ENOUGH, self._prompts):
            raise RolloutEnded(
                f"{len(failures)} of the last {seen} prompts failed for good, more than "
                f"rollout.max_failure_rate={self._max_rate:g} allows; the commonest reason: {commonest(failures)}"
            )

    def _note(self, prompt_id: str, reason: str | None) -> None:
        self._recent.pop(prompt_id, None)
        self._recent[prompt_id] = reason
        if len(self._recent) > WINDOW:
            self._recent.pop(next(iter(self._recent)))
