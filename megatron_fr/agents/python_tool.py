"""The agent that answers with the help of a Python tool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fr.agents.chat import Chat
from megatron_fr.agents.contract import Agent, Outcome, Prompt, TokenSession
from megatron_fr.agents.forkserver import ForkServer
from megatron_fr.agents.python_schema import PYTHON_TOOL_NAME, PYTHON_TOOL_SCHEMA
from megatron_fr.agents.tool_call import ToolCall, ToolCallError, parse_tool_calls
from megatron_fr.config import AgentConfig
from megatron_fr.trajectory import FinishReason

_NO_OUTPUT = "(the code printed nothing)"


@dataclass(frozen=True)
class _Response:
    text: str
    failed: bool


class PythonToolAgent(Agent):
    """Assistant turns and Python calls by turns, until a turn calls nothing.

    How a trajectory ends:

    - a turn without a tool call: ``stop``;
    - a turn cut off by a token limit, or no token left for another turn: ``length``; its calls are not carried out;
    - the last allowed turn (``agent.max_turns``) still calls a tool: ``stop``, as no token limit was hit. The call is
      neither carried out nor counted;
    - the engine gave up: ``aborted``.

    Every call that is answered counts as a tool call. It counts as a tool error too when it is malformed, names an
    unknown tool, or its code fails or runs out of time.
    """

    def __init__(self, tokenizer: Any, config: AgentConfig) -> None:
        self._config = config
        self._chat = Chat(tokenizer, [PYTHON_TOOL_SCHEMA], config.chat_template_kwargs)
        self._sandbox: ForkServer | None = None

    async def start(self) -> None:
        """Start the sandbox.

        Raises:
            ToolError: it does not start, or cannot cut off the network though ``agent.tool`` demands it.
        """
        sandbox = ForkServer(isolate=True, require_network_isolation=self._config.tool.require_network_isolation)
        await sandbox.start()
        self._sandbox = sandbox

    async def stop(self) -> None:
        """End the sandbox."""
        if self._sandbox is not None:
            await self._sandbox.stop()
            self._sandbox = None

    async def rollout(self, prompt: Prompt, session: TokenSession) -> Outcome:
        """Run the conversation of one prompt on ``session``."""
        messages = with_system_prompt(prompt.messages, self._config.system_prompt)
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
            wanted = parse_tool_calls(messages[-1]["content"])
            if not wanted or turns >= self._config.max_turns:
                return outcome("stop")
            if session.action_tokens_left <= 0:
                return outcome("length")
            started = time.monotonic()
            responses = await asyncio.gather(*(self._answer(call) for call in wanted))
            tools_s += time.monotonic() - started
            calls += len(responses)
            errors += sum(response.failed for response in responses)
            texts = [response.text for response in responses]
            messages += [{"role": "tool", "content": text} for text in texts]
            session.observe(self._chat.observation(texts))

    async def _answer(self, call: ToolCall | ToolCallError) -> _Response:
        if isinstance(call, ToolCallError):
            return _Response(f"Error: {call.reason}", failed=True)
        if call.name != PYTHON_TOOL_NAME:
            return _Response(f"Error: there is no tool {call.name!r}, only {PYTHON_TOOL_NAME!r}", failed=True)
        code = call.arguments.get("code")
        if not isinstance(code, str):
            return _Response(f'Error: {PYTHON_TOOL_NAME} takes "code", a string', failed=True)
        if self._sandbox is None:
            raise RuntimeError("PythonToolAgent.start() was not called before rollout()")
        result = await self._sandbox.run_code(code, self._config.tool)
        text = result.output.rstrip("\n")
        if result.error is not None and result.error not in text:
            text = f"{text}\n{result.error}" if text else result.error
        return _Response(text or _NO_OUTPUT, failed=result.error is not None)


def with_system_prompt(messages: Sequence[Mapping[str, Any]], system_prompt: str | None) -> list[dict[str, Any]]:
    """The conversation with ``system_prompt``, when given, in place of its own."""
    own = [dict(message) for message in messages]
    if system_prompt is None:
        return own
    return [{"role": "system", "content": system_prompt}, *(m for m in own if m.get("role") != "system")]
