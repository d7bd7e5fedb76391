"""``tools/count_path.py`` and docs/ARCHITECTURE.md tell one path."""

from __future__ import annotations

import re
from pathlib import Path

from tools.count_path import PACKAGE, STEPS

ROOT = Path(__file__).resolve().parents[2]


def test_every_file_on_the_path_exists_and_is_listed_once() -> None:
    files = [name for _, files in STEPS for name in files]
    assert [name for name in files if not (PACKAGE / name).is_file()] == []
    assert len(files) == len(set(files))


def test_the_steps_of_the_architecture_name_files_of_the_same_step() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    path = text.split("## The path of one trajectory")[1].split("\n## ")[0]
    told = re.findall(r"^(\d+)\. (.*(?:\n {3,}.*)*)", path, flags=re.MULTILINE)
    assert [int(number) for number, _ in told] == list(range(1, len(STEPS) + 1))
    for (_, text), (what, files) in zip(told, STEPS, strict=True):
        for name in re.findall(r"`([\w/]+\.py)`", text):
            assert any(f"/{file}".endswith(f"/{name}") for file in files), f"step '{what}' does not list {name}"
