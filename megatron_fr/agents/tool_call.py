"""The Python tool as chat templates describe it, and tool calls as Qwen models write them:
``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. Standard library only."""

from __future__ import annotations

import json
from dataclasses import dataclass
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

_OPEN, _CLOSE, _END_OF_THOUGHT = "<tool_call>", "</tool_call>", "</think>"


@dataclass(frozen=True)
class ToolCall:
    """A well-formed call."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ToolCallError:
    """A call that cannot be carried out; ``reason`` is for the model that wrote it."""

    reason: str


def parse_tool_calls(text: str) -> list[ToolCall | ToolCallError]:
    """The calls of one assistant turn, in order.

    Reasoning before ``</think>`` calls nothing. A call that the turn's end cuts off is an error.
    """
    calls: list[ToolCall | ToolCallError] = []
    rest = text.rpartition(_END_OF_THOUGHT)[2]
    while _OPEN in rest:
        rest = rest.partition(_OPEN)[2]
        body, close, after = rest.partition(_CLOSE)
        if close and _OPEN not in body:
            calls.append(_parse(body))
            rest = after
        else:  # never closed, or only a later opening is
            calls.append(ToolCallError(f"{_OPEN} without {_CLOSE}"))
            rest = rest if close else ""
    return calls


def _parse(body: str) -> ToolCall | ToolCallError:
    try:
        call = json.loads(body, strict=False)  # models write raw line ends inside strings
    except (ValueError, RecursionError) as error:
        return ToolCallError(f"a tool call must be JSON: {error}")
    if not isinstance(call, dict):
        return ToolCallError(f"a tool call must be a JSON object, not {type(call).__name__}")
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or not name:
        return ToolCallError('a tool call needs "name", a string')
    if isinstance(arguments, str):  # some models quote the object
        try:
            arguments = json.loads(arguments, strict=False)
        except ValueError:
            return ToolCallError('"arguments" must be a JSON object, not a string')
    if not isinstance(arguments, dict):
        return ToolCallError('a tool call needs "arguments", a JSON object')
    return ToolCall(name, arguments)
