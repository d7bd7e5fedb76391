"""Fresh tokens of one engine, by which the trainer checks the weights that the engine holds."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_fr.agents.contract import Outcome, Prompt
from megatron_fr.engines.client import EngineClient
from megatron_fr.rollout.session import EngineSession
from megatron_fr.trajectory import ModelLimits, Trajectory


class ProbeSampler:
    """Samples short trajectories that no prefix cache and no end token touches.

    Args:
        prompts: a random one begins each trajectory; at least one.
        template_kwargs: further variables of the chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompts: Sequence[Prompt],
        limits: ModelLimits,
        *,
        want_routes: bool,
        template_kwargs: Mapping[str, Any],
    ) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._limits = limits
        self._want_routes = want_routes
        self._template_kwargs = template_kwargs

    async def sample(self, client: EngineClient, max_tokens: int) -> Trajectory:
        """A trajectory of ``max_tokens`` action tokens with reward 0.

        Raises:
            EngineError: the engine failed.
            TrajectoryError: what it answered breaks the contract.
        """
        prompt = random.choice(self._prompts)
        session = EngineSession(
            client, self._limits, max_new_tokens=max_tokens, want_routes=self._want_routes, probe=True
        )
        session.observe(self._encode(prompt)[: self._limits.max_context - max_tokens])
        generation = await session.generate(stop_token_ids=[])
        trajectory = session.finish(
            Outcome((), generation.finish_reason, 1),
            trajectory_id="probe",
            prompt_id=prompt.id,
            group_id="probe",
            reward=0.0,
            reward_parts={},
        )
        trajectory.validate(self._limits)
        return trajectory

    def _encode(self, prompt: Prompt) -> list[int]:
        messages = [dict(m) for m in prompt.messages]
        if getattr(self._tokenizer, "chat_template", None):
            text = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **self._template_kwargs
            )
        else:
            text = "\n".join(str(m.get("content")) for m in messages)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
