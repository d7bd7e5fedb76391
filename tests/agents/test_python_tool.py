"""The Python tool agent: real chat rendering, real sandbox, scripted turns."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from megatron_fr.agents.arithmetic import questions
from megatron_fr.agents.chat import Chat
from megatron_fr.agents.contract import Outcome, Prompt
from megatron_fr.agents.python_tool import PythonToolAgent
from megatron_fr.agents.registry import make_agent
from megatron_fr.agents.tool_call import PYTHON_TOOL_SCHEMA
from megatron_fr.config import AgentConfig, ToolLimits
from megatron_fr.errors import ConfigError
from tests.agents.test_chat import CODER
from tests.support.scripted import ScriptedSession
from tools.tiny import make_tokenizer
from tools.tiny.traces import MODES, Mode, trace
from tools.tiny.warmup import encode_trace

QUESTION = Prompt("q", ({"role": "user", "content": "Compute 37 * 48, then subtract 159 from the result."},))


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def python(code: str) -> str:
    return "<tool_call>\n" + json.dumps({"name": "python", "arguments": {"code": code}}) + "\n</tool_call>"


def roll(
    tokenizer: Any,
    *turns: str,
    stopped: bool = True,
    prompt: Prompt = QUESTION,
    budget: int = 10_000,
    aborts: bool = False,
    **config: Any,
) -> tuple[Outcome, ScriptedSession]:
    """One rollout; every turn ends with the stop token, unless ``stopped`` is false and it is the last one."""
    texts = [turn + "<|im_end|>" for turn in turns]
    if not stopped:
        texts[-1] = turns[-1]
    session = ScriptedSession([encode(tokenizer, text) for text in texts], budget, aborts)

    async def main() -> Outcome:
        agent = PythonToolAgent(tokenizer, AgentConfig(**config))
        await agent.start()
        try:
            return await agent.rollout(prompt, session)
        finally:
            await agent.stop()

    return asyncio.run(main()), session


def test_calls_in_the_form_of_the_template_are_carried_out() -> None:
    coder = make_tokenizer()
    coder.chat_template = CODER
    turn = "<tool_call>\n<function=python>\n<parameter=code>\nprint(6 * 7)\n</parameter>\n</function>\n</tool_call>"
    outcome, _ = roll(coder, turn, "\\boxed{42}")
    assert outcome.messages[-2] == {"role": "tool", "content": "42"}
    assert (outcome.num_tool_calls, outcome.num_tool_errors) == (1, 0)


def test_a_solution_of_three_turns_is_token_by_token_the_templates_rendering(tokenizer: Any) -> None:
    turns = [python("print(37*48)"), python("print(1776-159)"), "\\boxed{1617}"]
    outcome, session = roll(tokenizer, *turns)
    messages = [
        *QUESTION.messages,
        {"role": "assistant", "content": turns[0]},
        {"role": "tool", "content": "1776"},
        {"role": "assistant", "content": turns[1]},
        {"role": "tool", "content": "1617"},
        {"role": "assistant", "content": turns[2]},
    ]
    assert list(outcome.messages) == messages
    assert (outcome.finish_reason, outcome.num_turns) == ("stop", 3)
    assert (outcome.num_tool_calls, outcome.num_tool_errors) == (2, 0)
    assert outcome.tools_s > 0
    text = tokenizer.apply_chat_template(messages, tools=[PYTHON_TOOL_SCHEMA], tokenize=False)
    assert text.endswith("<|im_end|>\n")
    assert list(session.tokens) == encode(tokenizer, text[:-1])
    sampled = [token for token, action in zip(session.tokens, session.mask, strict=True) if action]
    assert sampled == [token for turn in turns for token in encode(tokenizer, turn + "<|im_end|>")]


def test_sampled_tokens_are_never_tokenised_again(tokenizer: Any) -> None:
    """The digits of a turn spelled in single bytes stay as they were sampled."""
    turn = [*encode(tokenizer, "\\"), *encode(tokenizer, "b"), *encode(tokenizer, "oxed{5}<|im_end|>")]
    assert turn != encode(tokenizer, "\\boxed{5}<|im_end|>")
    session = ScriptedSession([turn])
    agent = PythonToolAgent(tokenizer, AgentConfig())
    outcome = asyncio.run(agent.rollout(QUESTION, session))
    assert outcome.messages[-1]["content"] == "\\boxed{5}"
    assert list(session.tokens)[-len(turn) :] == turn


def test_an_answer_without_a_call_ends_the_trajectory(tokenizer: Any) -> None:
    outcome, session = roll(tokenizer, "\\boxed{1}")
    assert (outcome.finish_reason, outcome.num_turns, outcome.num_tool_calls) == ("stop", 1, 0)
    assert len(session.observed) == 1


def test_two_calls_in_one_turn_are_answered_in_order(tokenizer: Any) -> None:
    slow_first = python("import time; time.sleep(0.3); print('first')") + "\n" + python("print('second')")
    outcome, _ = roll(tokenizer, slow_first, "done")
    assert [m["content"] for m in outcome.messages if m["role"] == "tool"] == ["first", "second"]
    assert outcome.num_tool_calls == 2


@pytest.mark.parametrize(
    ("turn", "response"),
    [
        ("<tool_call>\n{broken\n</tool_call>", "Error: a tool call must be JSON"),
        ('<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>', "Error: there is no tool 'rm', only 'python'"),
        ('<tool_call>\n{"name": "python", "arguments": {"cmd": "x"}}\n</tool_call>', 'Error: python takes "code"'),
        (python("1 / 0"), "Traceback (most recent call last):"),
        (python("import os; os._exit(7)"), "exit status 7"),
    ],
)
def test_a_call_that_fails_becomes_an_error_observation(tokenizer: Any, turn: str, response: str) -> None:
    outcome, _ = roll(tokenizer, turn, "I give up.")
    assert outcome.messages[2]["role"] == "tool"
    assert outcome.messages[2]["content"].startswith(response)
    assert (outcome.num_tool_calls, outcome.num_tool_errors) == (1, 1)
    assert outcome.finish_reason == "stop"


def test_a_call_that_hangs_becomes_an_error_observation(tokenizer: Any) -> None:
    outcome, _ = roll(tokenizer, python("print('so far')\nwhile True: pass"), "Too slow.", tool=ToolLimits(timeout_s=1))
    assert outcome.messages[2]["content"].startswith("so far\nTimeoutError: the code ran longer than 1 s")
    assert outcome.num_tool_errors == 1


def test_code_that_prints_nothing_is_told_so(tokenizer: Any) -> None:
    outcome, _ = roll(tokenizer, python("x = 1"), "ok")
    assert outcome.messages[2]["content"] == "(the code printed nothing)"
    assert outcome.num_tool_errors == 0


def test_a_turn_cut_off_by_the_budget_ends_with_length_and_calls_nothing(tokenizer: Any) -> None:
    whole = encode(tokenizer, python("print(1)"))
    outcome, session = roll(tokenizer, python("print(1)"), budget=len(whole))  # everything but the stop token
    assert (outcome.finish_reason, outcome.num_turns, outcome.num_tool_calls) == ("length", 1, 0)
    assert sum(session.mask) == len(whole)


def test_a_turn_that_uses_the_budget_up_exactly_ends_with_length(tokenizer: Any) -> None:
    budget = len(encode(tokenizer, python("print(1)") + "<|im_end|>"))
    outcome, session = roll(tokenizer, python("print(1)"), budget=budget)
    assert (outcome.finish_reason, outcome.num_tool_calls) == ("length", 0)
    assert len(session.observed) == 1


def test_the_limit_of_a_turn_is_passed_on_and_ends_with_length(tokenizer: Any) -> None:
    outcome, session = roll(tokenizer, "a long answer", max_tokens_per_turn=2)
    assert session.limits == [2]
    assert outcome.finish_reason == "length"


def test_the_last_allowed_turn_is_not_answered(tokenizer: Any) -> None:
    outcome, session = roll(tokenizer, python("print(1)"), python("print(2)"), max_turns=2)
    assert (outcome.finish_reason, outcome.num_turns, outcome.num_tool_calls) == ("stop", 2, 1)
    assert session.mask[-1]


def test_an_empty_turn_ends_the_trajectory_and_runs_no_call_of_the_message_before_it(tokenizer: Any) -> None:
    prompt = Prompt("q", ({"role": "user", "content": f"Calls look like this: {python('print(1)')}"},))
    session = ScriptedSession([[], encode(tokenizer, "\\boxed{1}<|im_end|>")])
    agent = PythonToolAgent(tokenizer, AgentConfig())
    outcome = asyncio.run(agent.rollout(prompt, session))
    assert (outcome.num_tool_calls, outcome.num_turns, outcome.finish_reason) == (0, 0, "stop")


def test_an_aborted_generation_ends_the_trajectory_as_aborted(tokenizer: Any) -> None:
    outcome, _ = roll(tokenizer, "half a tu", stopped=False, aborts=True)
    assert outcome.finish_reason == "aborted"


def test_the_system_prompt_of_the_configuration_replaces_the_datas(tokenizer: Any) -> None:
    prompt = Prompt("q", ({"role": "system", "content": "old"}, {"role": "user", "content": "hi"}))
    outcome, session = roll(tokenizer, "ok", prompt=prompt, system_prompt="Be brief.")
    assert [m["content"] for m in outcome.messages] == ["Be brief.", "hi", "ok"]
    assert "Be brief." in tokenizer.decode(session.tokens)
    assert "old" not in tokenizer.decode(session.tokens)
    outcome, _ = roll(tokenizer, "ok", prompt=prompt)
    assert outcome.messages[0]["content"] == "old"


@pytest.mark.parametrize("mode", MODES)
def test_the_warm_ups_traces_are_what_the_real_tool_and_template_produce(tokenizer: Any, mode: Mode) -> None:
    question = next(questions(11))
    messages = trace(question, mode, random.Random(0))
    prompt = Prompt("q", tuple(messages[:1]))
    ids, mask = encode_trace(tokenizer, messages)
    turns: list[list[int]] = []
    for i, written in enumerate(mask):
        if written and not mask[i - 1]:
            turns.append([])
        if written:
            turns[-1].append(ids[i])
    session = ScriptedSession(turns)

    async def main() -> Outcome:
        agent = PythonToolAgent(tokenizer, AgentConfig())
        await agent.start()
        try:
            return await agent.rollout(prompt, session)
        finally:
            await agent.stop()

    outcome = asyncio.run(main())
    assert list(session.tokens) == ids
    assert session.mask == mask
    assert outcome.num_tool_errors == (mode == "broken_code")


def test_agents_are_made_by_name_or_path(tokenizer: Any) -> None:
    assert isinstance(make_agent(AgentConfig(), tokenizer), PythonToolAgent)
    path = "megatron_fr.agents.python_tool:SingleTurnAgent"
    by_path = make_agent(AgentConfig(kind=path), tokenizer)
    assert type(by_path) is type(make_agent(AgentConfig(kind="single_turn"), tokenizer))
    session = ScriptedSession([encode(tokenizer, python("print(1)") + "<|im_end|>")])
    outcome = asyncio.run(by_path.rollout(QUESTION, session))
    assert (outcome.finish_reason, outcome.num_turns, outcome.num_tool_calls) == ("stop", 1, 0)
    assert "Tools:" not in tokenizer.decode(session.tokens)


class Optioned:
    def __init__(self, tokenizer: Any, config: AgentConfig, *, size: int) -> None:
        self.size = size


def test_options_reach_an_agent_of_ones_own_and_those_it_does_not_take_are_refused(tokenizer: Any) -> None:
    kind = f"{__name__}:Optioned"
    agent: Any = make_agent(AgentConfig(kind=kind, args={"size": 3}), tokenizer)
    assert agent.size == 3
    for config in (AgentConfig(kind=kind, args={"colour": 1}), AgentConfig(args={"size": 3})):
        with pytest.raises(ConfigError, match=r"agent.args=.* do not fit agent.kind=.*called with"):
            make_agent(config, tokenizer)


def test_template_variables_of_the_configuration_are_in_every_rendering(tokenizer: Any) -> None:
    thinking = make_tokenizer()
    tail = "{%- if add_generation_prompt and enable_thinking is false %}<think></think>{% endif %}"
    thinking.chat_template += tail
    options = {"enable_thinking": False}
    for kind in ("python_tool", "single_turn"):
        agent = make_agent(AgentConfig(kind=kind, chat_template_kwargs=options), thinking)
        session = ScriptedSession([encode(thinking, "Done.<|im_end|>")])
        asyncio.run(agent.rollout(QUESTION, session))
        assert thinking.decode(session.observed[0]).endswith("<think></think>")
    chat = Chat(thinking, [PYTHON_TOOL_SCHEMA], options)
    assert thinking.decode(chat.observation(["7"])).endswith("<think></think>")
    assert not thinking.decode(Chat(thinking).prompt(QUESTION.messages)).endswith("<think></think>")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("nope", "python_tool, single_turn"), ("no_such_module:X", "No module named"), ("json:Nope", "no attribute")],
)
def test_an_unknown_agent_is_refused_with_the_remedy(tokenizer: Any, kind: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        make_agent(AgentConfig(kind=kind), tokenizer)
    assert f"agent.kind={kind!r}" in str(caught.value)
