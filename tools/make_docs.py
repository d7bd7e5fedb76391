#!/usr/bin/env python3
"""Write docs/configuration.md from the configuration's models and docs/metrics.md from the catalogue of metrics."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megatron_fr.config import RunConfig
from megatron_fr.observe.catalogue import EVALUATION, METRICS

ROOT = Path(__file__).resolve().parents[1]
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_NOTE = "<!-- Made by tools/make_docs.py: do not edit. -->"


def configuration_page() -> str:
    """Markdown of every field of a run: type, default, bounds and meaning."""
    lines = [
        _NOTE,
        "# Configuration",
        "",
        "A run is one YAML file. `section.field=value` on the command line overrides a field.",
        "Unknown fields, values out of bounds and contradictions are refused before anything starts.",
        "",
        *_table(RunConfig, "", only_values=True),
    ]
    for name, field in RunConfig.model_fields.items():
        for model in _models(field.annotation):
            lines += _section(name, model)
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Markdown of every metric: unit and meaning."""
    lines = [
        _NOTE,
        "# Metrics",
        "",
        "`metrics.jsonl` has one JSON object for each update; TensorBoard has the same values.",
        "A value that is not finite is null. Held-out metrics have the name of the training metric",
        f"behind `{EVALUATION}`, and a named evaluation set adds its name: `{EVALUATION}reward/mean`,",
        f"`{EVALUATION}NAME/reward/mean`.",
        "",
        "| metric | unit | meaning |",
        "|---|---|---|",
    ]
    lines += [f"| `{name}` | {unit} | {meaning} |" for name, (unit, meaning) in METRICS.items()]
    return "\n".join(lines) + "\n"


PAGES = {"docs/configuration.md": configuration_page, "docs/metrics.md": metrics_page}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is stale")
    check = parser.parse_args().check
    for name, page in PAGES.items():
        path = ROOT / name
        if check and (not path.exists() or path.read_text() != page()):
            print(f"error: {name} is stale; run tools/make_docs.py", file=sys.stderr)
            return 1
        if not check:
            path.write_text(page())
    return 0


def _section(name: str, model: type[BaseModel]) -> list[str]:
    title = f"## `{name}`"
    if (tag := model.model_fields.get("name")) is not None:
        title += f" with `name: {tag.default}`"
    purpose = (model.__doc__ or "").strip().split("\n")[0]
    return ["", title, "", purpose, "", *_table(model, f"{name}.")]


def _table(model: type[BaseModel], prefix: str, *, only_values: bool = False) -> list[str]:
    lines = ["| field | type | default | bounds | meaning |", "|---|---|---|---|---|"]
    nested: list[str] = []
    for name, field in model.model_fields.items():
        models = _models(field.annotation)
        if models and only_values:
            continue
        if models:
            named = ".NAME" if get_origin(field.annotation) is dict else ""
            nested += _section(f"{prefix}{name}{named}", models[0])
            continue
        text = field.description or ("selects the algorithm" if name == "name" else "")
        lines.append(
            f"| `{prefix}{name}` | {_type(field.annotation)} | {_default(field)} | {_bounds(field)} | {_cell(text)} |"
        )
    return lines + nested


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field can hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _type(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if origin in (Union, UnionType):
        return " or ".join(_type(part) for part in get_args(annotation))
    if origin is dict:
        return "mapping"
    if origin in (list, tuple):
        return "list"
    return {type(None): "null", str: "text", Path: "path", bool: "true or false", int: "integer", float: "number"}.get(
        annotation, getattr(annotation, "__name__", str(annotation))
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined:
        return "null"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _bounds(field: FieldInfo) -> str:
    found = [
        (sign, getattr(item, name)) for item in field.metadata for name, sign in _BOUNDS.items() if hasattr(item, name)
    ]
    return ", ".join(f"{sign} {value}" for sign, value in found if value is not None)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
