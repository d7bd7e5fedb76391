"""The Python tool as chat templates describe it to a model. Standard library only."""

from __future__ import annotations

from typing import Any

PYTHON_TOOL_NAME = "python"

#: In the form that ``apply_chat_template(tools=...)`` takes; short, because every prompt carries it.
PYTHON_TOOL_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PYTHON_TOOL_NAME,
        "description": "Run Python code and return what it prints.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
