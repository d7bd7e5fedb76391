"""Every metric that the code writes has a unit and a meaning, and the pages made from the code are fresh."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

from megatron_fr.observe.catalogue import METRICS, find_metric

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [p for p in (ROOT / "megatron_fr").rglob("*.py") if p.name != "catalogue.py"]
PREFIXES = {name.partition("/")[0] for name in METRICS if "/" in name} | {"eval"}


def metric_names(source: str) -> set[str]:
    """Text literals that look like a metric; what an f-string fills in is a star."""
    names = set()
    tree = ast.parse(source)
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in inner:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        prefix, _, rest = text.partition("/")
        if prefix in PREFIXES and re.fullmatch(r"[\w/*]+", rest):
            names.add(text)
    return names


@pytest.mark.parametrize("page", ["docs/configuration.md", "docs/metrics.md"])
def test_the_page_is_what_the_code_says(page: str) -> None:
    made = runpy.run_path(str(ROOT / "tools" / "make_docs.py"))["PAGES"][page]()
    assert made == (ROOT / page).read_text(), f"{page} is stale: run tools/make_docs.py"


def test_every_metric_in_the_code_is_in_the_catalogue() -> None:
    found = {name: path for path in SOURCES for name in metric_names(path.read_text())}
    assert "policy/entropy" in found
    assert "sync/probe_logprob_diff" in found
    assert {name: path for name, path in found.items() if "*" not in name and not find_metric(name)} == {}


def test_every_metric_in_the_catalogue_is_in_the_code() -> None:
    found = {name for path in SOURCES for name in metric_names(path.read_text())}
    patterns = [re.compile(re.escape(name).replace(r"\*", r"\w+")) for name in found if "*" in name]

    def written(name: str) -> bool:
        return name in found or any(pattern.fullmatch(name.replace("*", "x")) for pattern in patterns)

    assert [name for name in METRICS if "/" in name and not written(name)] == []


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("reward/mean", True), ("reward/format", True), ("eval/reward/mean", True), ("eval/hard/tools/calls", True),
        ("eval/reward/format", True), ("policy/entropi", False), ("eval/nothing", False), ("nothing/mean", False),
    ],
)  # fmt: skip
def test_names_are_found_also_behind_an_evaluation(name: str, known: bool) -> None:
    assert (find_metric(name) is not None) == known
