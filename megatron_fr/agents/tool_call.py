"""The Python tool as chat templates describe it, and tool calls as Qwen models write them, in JSON or in XML:
``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, or
``<tool_call><function=NAME><parameter=NAME>value</parameter></function></tool_call>``. Standard library only."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

PYTHON_TOOL_NAME = "python"
MAX_CALLS = 64  #: of one turn; each costs time in the length of the turn

#: In the form that ``apply_chat_template(tools=...)`` takes; short, because every prompt carries it.
PYTHON_TOOL_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PYTHON_TOOL_NAME,
        "description": "Run Python code and return what it prints.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}

_OPEN, _CLOSE, _THOUGHT, _END_OF_THOUGHT = "<tool_call>", "</tool_call>", "<think>", "</think>"
_MARK = re.compile(f"{_OPEN}|{_THOUGHT}|{_END_OF_THOUGHT}")
_SPACE = re.compile(r"\s*")
_END_OF_CALL = re.compile(rf"\s*{_CLOSE}")
#: A value may hold every closing tag but the ones that end its call.
_XML_CALL = re.compile(r"\s*<function=([^<>\n]+)>")
_END_OF_XML_CALL = re.compile(rf"</function>\s*{_CLOSE}")
_XML_ARGUMENT = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?\Z", re.DOTALL)
_END_OF_ARGUMENT = re.compile(r"</parameter>(?=\s*(?:<parameter=|\Z))")
_JSON = json.JSONDecoder(strict=False)  # models write raw line ends inside strings


@dataclass(frozen=True)
class ToolCall:
    """A well-formed call."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ToolCallError:
    """A call that cannot be carried out; ``reason`` is for the model that wrote it."""

    reason: str


def parse_tool_calls(text: str, *, xml: bool = False, thinking: bool = False) -> list[ToolCall | ToolCallError]:
    """The calls of one assistant turn, in order. Thoughts call nothing, also one that never ends.

    A tag inside a call's argument is text. A call that the turn's end cuts off is an error.

    Args:
        xml: the form of the calls; the other form is an error.
        thinking: the turn began inside a thought, which the prompt opened.
    """
    calls: list[ToolCall | ToolCallError] = []
    parsed = 0  # also those of thoughts
    at = _after_thought(text, 0) if thinking else 0
    while mark := _MARK.search(text, at):
        at = mark.end()
        if mark[0] == _THOUGHT:
            at = _after_thought(text, at)
        elif mark[0] == _END_OF_THOUGHT:
            calls.clear()  # the prompt had opened the thought
        elif (parsed := parsed + 1) > MAX_CALLS:
            return [*calls, ToolCallError(f"more than {MAX_CALLS} tool calls in one turn; the others were left out")]
        else:
            call, at = (_xml_call if xml else _json_call)(text, at)
            calls.append(call)
    return calls


def _after_thought(text: str, start: int) -> int:
    end = text.find(_END_OF_THOUGHT, start)
    return len(text) if end < 0 else end + len(_END_OF_THOUGHT)


def _json_call(text: str, start: int) -> tuple[ToolCall | ToolCallError, int]:
    """The call whose tag ends at ``start``, and where the text goes on."""
    reason, end = "there is more than one value", start
    try:
        value, end = _JSON.raw_decode(text, _SPACE.match(text, start).end())  # type: ignore[union-attr]
    except (ValueError, RecursionError) as error:
        reason = str(error)
    else:
        if close := _END_OF_CALL.match(text, end):
            return _checked(value), close.end()
    return _broken_call(text, end, f"a tool call must be JSON: {reason}")


def _xml_call(text: str, start: int) -> tuple[ToolCall | ToolCallError, int]:
    if (call := _XML_CALL.match(text, start)) and (end := _END_OF_XML_CALL.search(text, call.end())):
        parts = _END_OF_ARGUMENT.split(text[call.end() : end.start()])[:-1]
        found = (argument for part in parts if (argument := _XML_ARGUMENT.search(part)))
        return ToolCall(call[1], {argument[1]: argument[2] for argument in found}), end.end()
    form = "<function=NAME><parameter=NAME>value</parameter></function>"
    return _broken_call(text, start, f"a tool call must be {form}")


def _broken_call(text: str, start: int, reason: str) -> tuple[ToolCallError, int]:
    """What is wrong with a call that holds no readable value up to ``start``, and where the text goes on."""
    close = text.find(_CLOSE, start)
    opening = text.find(_OPEN, start, close if close >= 0 else len(text))
    if close < 0 or opening >= 0:  # never closed, or only a later one is
        return ToolCallError(f"{_OPEN} without {_CLOSE}"), len(text) if close < 0 else opening
    return ToolCallError(reason), close + len(_CLOSE)


def _checked(call: Any) -> ToolCall | ToolCallError:
    if not isinstance(call, dict):
        return ToolCallError(f"a tool call must be a JSON object, not {type(call).__name__}")
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or not name:
        return ToolCallError('a tool call needs "name", a string')
    if isinstance(arguments, str):  # some models quote the object
        try:
            arguments = _JSON.decode(arguments)
        except (ValueError, RecursionError):
            return ToolCallError('"arguments" must be a JSON object, not a string')
    if not isinstance(arguments, dict):
        return ToolCallError('a tool call needs "arguments", a JSON object')
    return ToolCall(name, arguments)
