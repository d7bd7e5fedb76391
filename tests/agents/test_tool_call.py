from __future__ import annotations

import json
import time

import pytest

from megatron_fr.agents.tool_call import MAX_CALLS, ToolCall, ToolCallError, parse_tool_calls


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


@pytest.mark.parametrize(
    "code",
    ["print('a</think>b')", "print('</tool_call>')", "print('<tool_call>{}</tool_call>')", "print('<think>')"],
)
def test_a_tag_inside_an_argument_is_text(code: str) -> None:
    turn = "<think>plan</think>\n" + call(json.dumps({"name": "python", "arguments": {"code": code}}))
    assert parse_tool_calls(turn) == [ToolCall("python", {"code": code})]
    turn = call(f"<function=python>\n<parameter=code>\n{code}\n</parameter>\n</function>")
    assert parse_tool_calls(turn, xml=True) == [ToolCall("python", {"code": code})]


def test_calls_in_a_thought_that_never_ends_are_not_made() -> None:
    inside = call('{"name": "f", "arguments": {}}')
    assert parse_tool_calls(f"<think>I could try {inside} but") == []
    assert parse_tool_calls(f"I could try {inside} but", thinking=True) == []
    assert len(parse_tool_calls(f"I could try {inside} but</think>{inside}", thinking=True)) == 1


def test_what_cannot_be_decoded_is_an_error_of_its_call_alone() -> None:
    good = call('{"name": "f", "arguments": {}}')
    for body in (
        '{"name": "f", "arguments": "' + "[" * 100_000 + '"}',
        '{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}",
        '{"name": "f", "arguments": ' + '{"a":' * 50_000,
    ):
        bad, after = parse_tool_calls(call(body) + good)
        assert isinstance(bad, ToolCallError)
        assert after == ToolCall("f", {})


def test_calls_in_xml_keep_their_arguments_lines() -> None:
    arguments = "<parameter=query>\nline 1\n\n  line 3\n</parameter>\n<parameter=n>\n3\n</parameter>"
    turn = call(f"<function=search>\n{arguments}\n</function>")
    assert parse_tool_calls(f"Let me see.\n{turn}", xml=True) == [
        ToolCall("search", {"query": "line 1\n\n  line 3", "n": "3"})
    ]


def test_the_other_form_of_a_call_is_an_error_that_shows_the_right_one() -> None:
    in_json, in_xml = call('{"name": "f", "arguments": {}}'), call("<function=f>\n</function>")
    for turn, xml, form in ((in_json, True, "<function=NAME>"), (in_xml, False, "must be JSON")):
        (error,) = parse_tool_calls(turn, xml=xml)
        assert isinstance(error, ToolCallError)
        assert form in error.reason


@pytest.mark.parametrize(
    ("text", "xml"),
    [
        ("<tool_call><function=f>" + "<parameter=b>" * 20_000, True),
        ("<tool_call><function=f>" + "<parameter=" * 20_000 + "</function></tool_call>", True),
        ("<tool_call>" * 40_000 + "</tool_call>", False),
        (call("{oops") * 20_000, False),
    ],
    ids=["arguments", "openings of arguments", "openings", "broken calls"],
)
def test_the_time_grows_with_the_length_of_the_turn_alone(text: str, xml: bool) -> None:
    started = time.process_time()
    calls = parse_tool_calls(text, xml=xml)
    assert time.process_time() - started < 2  # seconds; 10 and more where it grows with the square
    assert 1 <= len(calls) <= MAX_CALLS + 1
