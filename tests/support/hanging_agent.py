"""An agent and a reward with a few prompts that they cannot do."""

from __future__ import annotations

import asyncio

from megatron_fr.agents.contract import Outcome, Prompt, RewardInput, TokenSession
from megatron_fr.agents.python_tool import SingleTurnAgent
from tests.support.varied_reward import by_length

HANGS, RAISES = {"11"}, {"7", "23", "41"}  # of 64


class HangingAgent(SingleTurnAgent):
    async def rollout(self, prompt: Prompt, session: TokenSession) -> Outcome:
        if prompt.id in HANGS:
            await asyncio.Event().wait()
        return await super().rollout(prompt, session)


def raising(seen: RewardInput) -> float:
    if seen.prompt.id in RAISES:
        raise KeyError(f"no answer to {seen.prompt.id}")
    return by_length(seen)
