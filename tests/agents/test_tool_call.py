from __future__ import annotations

import pytest

from megatron_fr.agents.tool_call import ToolCall, ToolCallError, parse_tool_calls


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def test_text_without_calls_has_none() -> None:
    assert parse_tool_calls("The answer is \\boxed{5}.") == []


def test_one_call_among_text_is_found() -> None:
    text = "Let me see.\n" + call('{"name": "python", "arguments": {"code": "print(\\"<tool>\\\\n\\")"}}')
    assert parse_tool_calls(text) == [ToolCall("python", {"code": 'print("<tool>\\n")'})]


def test_several_calls_keep_their_order_and_bad_ones_their_place() -> None:
    text = "\n".join(
        [call('{"name": "a", "arguments": {}}'), call("{oops"), call('{"name": "b", "arguments": {"x": 1}}')]
    )
    first, second, third = parse_tool_calls(text)
    assert (first, third) == (ToolCall("a", {}), ToolCall("b", {"x": 1}))
    assert isinstance(second, ToolCallError)
    assert "must be JSON" in second.reason


def test_raw_line_ends_inside_strings_are_accepted() -> None:
    assert parse_tool_calls(call('{"name": "python", "arguments": {"code": "a = 1\nprint(a)"}}')) == [
        ToolCall("python", {"code": "a = 1\nprint(a)"})
    ]


def test_arguments_quoted_as_a_string_are_accepted() -> None:
    assert parse_tool_calls(call('{"name": "f", "arguments": "{\\"x\\": 2}"}')) == [ToolCall("f", {"x": 2})]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", "must be JSON"),
        ("[1]", "JSON object, not list"),
        ('{"arguments": {}}', '"name"'),
        ('{"name": 3, "arguments": {}}', '"name"'),
        ('{"name": "f"}', '"arguments"'),
        ('{"name": "f", "arguments": [1]}', '"arguments"'),
        ('{"name": "f", "arguments": "x"}', '"arguments"'),
        ("[" * 100_000, "must be JSON"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(body: str, reason: str) -> None:
    (result,) = parse_tool_calls(call(body))
    assert isinstance(result, ToolCallError)
    assert reason in result.reason


def test_a_call_that_is_not_closed_is_an_error() -> None:
    (result,) = parse_tool_calls('<tool_call>\n{"name": "f", "arguments": {}}')
    assert result == ToolCallError("<tool_call> without </tool_call>")
    unclosed, good = parse_tool_calls("<tool_call>{" + call('{"name": "f", "arguments": {}}'))
    assert isinstance(unclosed, ToolCallError)
    assert good == ToolCall("f", {})


def test_calls_inside_the_reasoning_are_not_made() -> None:
    inside = call('{"name": "f", "arguments": {}}')
    assert parse_tool_calls(f"<think>maybe {inside}</think>No.") == []
    assert len(parse_tool_calls(f"<think>hm</think>{inside}")) == 1
