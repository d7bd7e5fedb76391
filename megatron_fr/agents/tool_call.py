"""Tool calls as Qwen models write them: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

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
    """The calls of one assistant turn, in order; empty when the turn calls nothing.

    What stands before ``</think>`` is the model's reasoning and calls nothing. A call that the turn's end cuts off is
    an error, not a call.
    """
    rest = text.rpartition(_END_OF_THOUGHT)[2]
    calls: list[ToolCall | ToolCallError] = []
    while _OPEN in rest:
        rest = rest.partition(_OPEN)[2]
        body, close, after = rest.partition(_CLOSE)
        if not close:
            calls.append(ToolCallError(f"{_OPEN} without {_CLOSE}"))
            break
        if _OPEN in body:  # the first of two openings was never closed
            calls.append(ToolCallError(f"{_OPEN} without {_CLOSE}"))
            continue
        calls.append(_parse(body))
        rest = after
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
