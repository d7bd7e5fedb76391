"""The prompts that a run gave up, in its folder: one JSON object a line, with ``prompt_id`` and ``reason``."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

FAILURES_FILE = "failed_prompts.jsonl"


def append_failures(folder: Path, reasons: Mapping[str, str]) -> None:
    """Add prompts, by id, with the reason of each."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FAILURES_FILE).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"prompt_id": name, "reason": why}) + "\n" for name, why in reasons.items())


def read_failures(folder: Path) -> dict[str, str]:
    """The reason for each prompt id; empty where there is no such file. A line that is being written is left out."""
    path = folder / FAILURES_FILE
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return {row["prompt_id"]: row["reason"] for row in map(json.loads, lines)}


def commonest(reasons: Iterable[str], count: int = 1) -> str:
    """The commonest kinds of reasons, ``12 x RewardError: ...``; names in quotes and numbers make no kind of their own.
    Each kind shows its last reason."""
    kinds: Counter[str] = Counter()
    shown: dict[str, str] = {}
    for reason in reasons:
        kind = re.sub(r"'[^']*'|\d+", "#", reason)
        kinds[kind] += 1
        shown[kind] = reason if len(reason) <= 300 else f"{reason[:300]}..."
    return "; ".join(f"{number} x {shown[kind]}" for kind, number in kinds.most_common(count))
