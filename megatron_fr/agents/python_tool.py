"""The built-in agents: with a Python tool over several turns, and with a single turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_fr.agents.chat import Chat
from megatron_fr.agents.contract import Agent, Outcome, Prompt, TokenSession
from megatron_fr.agents.tool_call import PYTHON_TOOL_NAME, PYTHON_TOOL_SCHEMA, ToolCall, ToolCallError, parse_tool_calls
from megatron_fr.config import AgentConfig
from megatron_fr.sandbox import Sandbox
from megatron_fr.trajectory import FinishReason


class SingleTurnAgent(Agent):
    """Samples one turn without tools; the trajectory ends as the turn does (``stop``, ``length`` or ``aborted``)."""

    def __init__(self, tokenizer: Any, config: AgentConfig) -> None:
        self._config = config
        self._chat = Chat(tokenizer, template_kwargs=config.chat_template_kwargs)

    async def rollout(self, prompt: Prompt, session: TokenSession) -> Outcome:
        messages = _with_system_prompt(prompt.messages, self._config.system_prompt)
        session.observe(self._chat.prompt(messages))
        generation = await session.generate(
            stop_token_ids=self._chat.stop_token_ids, max_tokens=self._config.max_tokens_per_turn
        )
        if generation.token_ids:
            messages.append({"role": "assistant", "content": self._chat.decode(generation.token_ids)})
        return Outcome(tuple(messages), generation.finish_reason, num_turns=int(bool(generation.token_ids)))


class PythonToolAgent(Agent):
    """Assistant turns and Python calls by turns, until a turn calls nothing.

    A trajectory ends with ``stop`` when a turn calls nothing or is the last allowed one, with ``length`` when no token
    is left, with ``aborted`` when the engine gave up. Calls of its last turn are neither carried out nor counted.
    Every answered call counts as a tool call, and as a tool error when it is malformed, unknown, fails or times out.
    """

    def __init__(self, tokenizer: Any, config: AgentConfig) -> None:
        self._config = config
        self._chat = Chat(tokenizer, [PYTHON_TOOL_SCHEMA], config.chat_template_kwargs)
        self._sandbox = Sandbox(config.tool)

    async def start(self) -> None:
        await self._sandbox.start()

    async def stop(self) -> None:
        await self._sandbox.stop()

    def metrics(self) -> Mapping[str, float]:
        return {"tools/refused_total": float(self._sandbox.refused)}

    async def rollout(self, prompt: Prompt, session: TokenSession) -> Outcome:
        messages = _with_system_prompt(prompt.messages, self._config.system_prompt)
        session.observe(self._chat.prompt(messages))
        turns = calls = errors = 0
        tools_s = 0.0

        def outcome(reason: FinishReason) -> Outcome:
            return Outcome(tuple(messages), reason, turns, calls, errors, tools_s)

        while True:
            generation = await session.generate(
                stop_token_ids=self._chat.stop_token_ids, max_tokens=self._config.max_tokens_per_turn
            )
            if generation.token_ids:
                turns += 1
                messages.append({"role": "assistant", "content": self._chat.decode(generation.token_ids)})
            if generation.finish_reason != "stop":
                return outcome(generation.finish_reason)
            if not generation.token_ids:  # the message before it is not the policy's, or was answered
                return outcome("stop")
            wanted = parse_tool_calls(messages[-1]["content"], xml=self._chat.xml_calls, thinking=self._chat.thinking)
            if not wanted or turns >= self._config.max_turns:
                return outcome("stop")
            if session.action_tokens_left <= 0:
                return outcome("length")
            started = time.monotonic()
            responses = await self._answers(wanted, id(session))
            tools_s += time.monotonic() - started
            calls += len(responses)
            errors += sum(failed for _, failed in responses)
            messages += [{"role": "tool", "content": text} for text, _ in responses]
            session.observe(self._chat.observation([text for text, _ in responses]))

    async def _answers(self, calls: Sequence[ToolCall | ToolCallError], owner: int) -> list[tuple[str, bool]]:
        return await asyncio.gather(*(self._answer(call, owner) for call in calls))

    async def _answer(self, call: ToolCall | ToolCallError, owner: int | None = None) -> tuple[str, bool]:
        """What the model sees, and whether the call failed."""
        if isinstance(call, ToolCallError):
            return f"Error: {call.reason}", True
        if call.name != PYTHON_TOOL_NAME:
            return f"Error: there is no tool {call.name!r}, only {PYTHON_TOOL_NAME!r}", True
        code = call.arguments.get("code")
        if not isinstance(code, str):
            return f'Error: {PYTHON_TOOL_NAME} takes "code", a string', True
        result = await self._sandbox.run_code(code, owner=owner)
        text = result.output.rstrip("\n")
        if result.error is not None and result.error not in text:
            text = f"{text}\n{result.error}" if text else result.error
        return text or "(the code printed nothing)", result.error is not None


def _with_system_prompt(messages: Sequence[Mapping[str, Any]], system_prompt: str | None) -> list[dict[str, Any]]:
    """The conversation with ``system_prompt``, when given, in place of its own."""
    own = [dict(message) for message in messages]
    if system_prompt is None:
        return own
    return [{"role": "system", "content": system_prompt}, *(m for m in own if m.get("role") != "system")]
