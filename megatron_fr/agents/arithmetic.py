"""A two-step arithmetic task that a tiny policy solves with a Python tool, and its reward.

``Compute 37 * 48, then subtract 159 from the result.`` takes two tool calls and the answer in ``\\boxed{}``.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_fr.agents.contract import RewardInput


@dataclass(frozen=True)
class Question:
    """``first * second``, then ``operation`` (``+`` or ``-``) with ``third``."""

    first: int
    second: int
    operation: str
    third: int

    @property
    def text(self) -> str:
        step = f"add {self.third} to" if self.operation == "+" else f"subtract {self.third} from"
        return f"Compute {self.first} * {self.second}, then {step} the result."

    @property
    def intermediate(self) -> int:
        return self.first * self.second

    @property
    def answer(self) -> int:
        return self.intermediate + (self.third if self.operation == "+" else -self.third)

    @property
    def held_out(self) -> bool:
        """Whether it is in the held-out tenth: fixed by its text, so the two sets never overlap."""
        return zlib.crc32(self.text.encode()) % 10 == 0

    def record(self) -> dict[str, Any]:
        """The line of a prompt file."""
        name = f"{self.first}*{self.second}{self.operation}{self.third}"
        return {"id": name, "prompt": self.text, "answer": self.answer, "intermediate": self.intermediate}


def questions(seed: int, *, held_out: bool = False) -> Iterator[Question]:
    """Endless distinct questions of one of the two disjoint sets, the same for the same seed."""
    rng = random.Random(seed)
    seen: set[Question] = set()
    while True:
        question = Question(rng.randint(11, 99), rng.randint(11, 99), rng.choice("+-"), rng.randint(101, 999))
        # four digits, so that guessing does not pay
        in_range = 1000 <= question.intermediate <= 9999 and 1000 <= question.answer <= 9999
        if in_range and question.held_out == held_out and question not in seen:
            seen.add(question)
            yield question


def boxed_integer(text: str) -> int | None:
    """The integer in the last ``\\boxed{}`` of ``text``, or None where there is none."""
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", text)
    content = boxes[-1].strip().replace(",", "") if boxes else ""
    return int(content) if re.fullmatch(r"-?\d{1,18}", content) else None  # int() refuses thousands of digits


def exact_answer(episode: RewardInput) -> dict[str, float]:
    """1.0 when the final message boxes the right integer, else 0.0; ``stopped_early``: it boxes the first result."""
    value = boxed_integer(episode.final_text)
    return {
        "reward": float(value is not None and value == int(episode.prompt.answer)),
        "answered": float(value is not None),
        "stopped_early": float(value is not None and value == episode.prompt.metadata.get("intermediate")),
        "used_tool": float(episode.num_tool_calls > 0),
    }
