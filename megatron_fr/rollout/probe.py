"""Fresh tokens of one engine, by which the trainer checks the weights that the engine holds."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_fr.agents.contract import Outcome, Prompt
from megatron_fr.engines.client import EngineClient
from megatron_fr.errors import ModelError
from megatron_fr.rollout.session import EngineSession
from megatron_fr.trajectory import ModelLimits, Trajectory


@dataclass(frozen=True)
class ProbeSampler:
    """Samples short trajectories, begun by a random prompt, that no prefix cache and no end token touches."""

    tokenizer: Any
    prompts: Sequence[Prompt]
    limits: ModelLimits
    want_routes: bool
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def tokens(self, prompt: Prompt) -> list[int]:
        """The prompt through the chat template, if there is one, and the tokenizer; ModelError where one cannot."""
        messages = [dict(m) for m in prompt.messages]
        text = "\n".join(str(m.get("content")) for m in messages)
        try:
            if getattr(self.tokenizer, "chat_template", None):
                text = self.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False, **self.template_kwargs
                )
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        except Exception as error:  # whatever a template's code or the tokenizer raises
            reason = " ".join(str(error).split())[:300]
            raise ModelError(
                f"the tokenizer or chat template in model.path cannot take prompt {prompt.id!r}: "
                f"{type(error).__name__}: {reason}; mend it, or agent.chat_template_kwargs"
            ) from error

    async def sample(self, client: EngineClient, max_tokens: int) -> Trajectory:
        """A trajectory of ``max_tokens`` action tokens with reward 0.

        Raises:
            EngineError: the engine failed.
            TrajectoryError: what it answered breaks the contract.
        """
        prompt = random.choice(self.prompts)
        tokens = self.tokens(prompt)
        session = EngineSession(
            client, self.limits, max_new_tokens=max_tokens, want_routes=self.want_routes, probe=True
        )
        session.observe(tokens[: self.limits.max_context - max_tokens])
        generation = await session.generate(stop_token_ids=[])
        outcome = Outcome((), generation.finish_reason, 1)
        trajectory = session.finish(outcome, id="probe", prompt_id=prompt.id, group_id="probe", reward=0.0)
        trajectory.validate(self.limits)
        return trajectory
