"""Conversations on the arithmetic task, from which the tiny tokenizer and the warm-up learn."""

from __future__ import annotations

import random
from typing import Any, Literal, get_args

from megatron_fr.agents.arithmetic import Question
from megatron_fr.agents.tool_call import PYTHON_TOOL_NAME

Mode = Literal["solve", "guess", "stop_early", "broken_code"]
MODES: tuple[Mode, ...] = get_args(Mode)

#: What the Python tool answers to an unclosed parenthesis; a test compares it with the real tool.
_SYNTAX_ERROR = "  File \"<tool>\", line 1\n    {code}\n         ^\nSyntaxError: '(' was never closed"

Message = dict[str, Any]


def trace(question: Question, mode: Mode, rng: random.Random) -> list[Message]:
    """Write a conversation about ``question``.

    ``solve`` calls the tool twice and is right. ``guess`` answers with a random number. ``stop_early`` answers with the
    intermediate value. ``broken_code`` gets a syntax error and then guesses.
    """
    messages: list[Message] = [{"role": "user", "content": question.text}]
    product = f"{question.first}*{question.second}"
    guess = rng.randint(1000, 9999)
    if mode == "guess":
        return [*messages, _answer(guess)]
    if mode == "broken_code":
        code = f"print({product}"
        return [*messages, _call(code), _response(_SYNTAX_ERROR.format(code=code)), _answer(guess)]
    messages += [_call(f"print({product})"), _response(str(question.intermediate))]
    if mode == "stop_early":
        return [*messages, _answer(question.intermediate)]
    code = f"print({question.intermediate}{question.operation}{question.third})"
    return [*messages, _call(code), _response(str(question.answer)), _answer(question.answer)]


def _call(code: str) -> Message:
    function = {"name": PYTHON_TOOL_NAME, "arguments": {"code": code}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def _response(text: str) -> Message:
    return {"role": "tool", "content": text}


def _answer(value: int) -> Message:
    return {"role": "assistant", "content": f"\\boxed{{{value}}}"}
