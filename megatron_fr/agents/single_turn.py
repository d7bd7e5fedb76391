"""The agent without tools: one assistant turn, as for long chain-of-thought mathematics."""

from __future__ import annotations

from typing import Any

from megatron_fr.agents.chat import Chat
from megatron_fr.agents.contract import Agent, Outcome, Prompt, TokenSession
from megatron_fr.agents.python_tool import with_system_prompt
from megatron_fr.config import AgentConfig


class SingleTurnAgent(Agent):
    """Samples one turn; the trajectory ends as the turn does (``stop``, ``length`` or ``aborted``)."""

    def __init__(self, tokenizer: Any, config: AgentConfig) -> None:
        self._config = config
        self._chat = Chat(tokenizer, template_kwargs=config.chat_template_kwargs)

    async def rollout(self, prompt: Prompt, session: TokenSession) -> Outcome:
        """Run the conversation of one prompt on ``session``."""
        messages = with_system_prompt(prompt.messages, self._config.system_prompt)
        session.observe(self._chat.prompt(messages))
        generation = await session.generate(
            stop_token_ids=self._chat.stop_token_ids, max_tokens=self._config.max_tokens_per_turn
        )
        if generation.token_ids:
            messages.append({"role": "assistant", "content": self._chat.decode(generation.token_ids)})
        return Outcome(tuple(messages), generation.finish_reason, num_turns=1 if generation.token_ids else 0)
