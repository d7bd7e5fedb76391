"""What keeps the checkout in order: the linter's verdict, and the names in docs/PITFALLS_TESTS.md."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"


def test_a_folder_that_a_run_makes_changes_no_verdict_of_the_linter(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "probe.py").write_text(
        "import pytest\nfrom runs import x\n\nimport megatron_fr\n\n[pytest, megatron_fr, x]\n"
    )
    command = [sys.executable, "-m", "ruff", "check", "--select", "I", "--no-cache", "."]
    for name in (None, "runs", "outputs"):
        if name:
            (tmp_path / name).mkdir()
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, (name, done.stdout)


def test_no_test_tool_or_benchmark_changes_the_import_path() -> None:
    for folder in ("tests", "tools", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            assert "sys.path." + "insert" not in path.read_text(), path


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_named_in_the_page_of_pitfalls_exists() -> None:
    page = (ROOT / "docs" / "PITFALLS_TESTS.md").read_text()
    checked, missing = 0, []
    file: Path | None = None
    for name, test in re.findall(r"`([\w/]*?\w+\.py)?(?:::(\w+))?`", page):
        if not name and not test:
            continue
        if name:
            file = TESTS / name
        assert file is not None
        checked += 1
        if not file.is_file() or (test and test not in functions(file)):
            missing.append(f"{file.relative_to(TESTS)}::{test}")
    assert missing == []
    assert checked > 60


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_every_link_to_a_file_of_the_checkout_leads_to_one(name: str) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / name).read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []
