"""One prompt, one agent, one engine: one trajectory with its reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_fr.agents.contract import Agent, Prompt, RewardInput
from megatron_fr.config import RolloutConfig
from megatron_fr.engines.fleet import Fleet
from megatron_fr.errors import EngineError, TrajectoryError
from megatron_fr.rollout.session import EngineSession, bounded_json
from megatron_fr.trajectory import ModelLimits, Trajectory


class Rewards(Protocol):
    """What scores a finished conversation; see :class:`megatron_fr.agents.rewards.RewardRunner`."""

    async def score(self, episode: RewardInput) -> tuple[float, dict[str, float]]:
        """The reward and its named parts."""


@dataclass(frozen=True)
class EpisodeRunner:
    """Runs episodes, any number at a time; holds what they share."""

    fleet: Fleet
    agent: Agent
    rewards: Rewards
    limits: ModelLimits
    config: RolloutConfig
    want_routes: bool

    async def run(
        self,
        prompt: Prompt,
        *,
        trajectory_id: str,
        group_id: str,
        queued_s: float = 0.0,
        temperature: float | None = None,
    ) -> Trajectory:
        """Roll the prompt out on the least loaded engine and score it.

        Args:
            temperature: of sampling, for evaluations alone; None is the one that the trainer's logits are scaled by.

        Raises:
            EngineError: the engine failed, or aborted the generation for good.
            RewardError: the reward function failed.
            TrajectoryError: the prompt leaves no token to sample; trying again cannot help.
        """
        with self.fleet.borrow() as client:
            session = EngineSession(
                client,
                self.limits,
                max_new_tokens=self.config.max_new_tokens,
                want_routes=self.want_routes,
                temperature=temperature,
            )
            outcome = await self.agent.rollout(prompt, session)
        if outcome.finish_reason == "aborted":
            raise EngineError(f"engine {client.url} aborted trajectory {trajectory_id} (prompt {prompt.id!r})")
        if session.num_action_tokens == 0:
            raise TrajectoryError(
                f"trajectory {trajectory_id} (prompt {prompt.id!r}): {len(session.tokens)} prompt tokens leave nothing "
                f"to sample in rollout.max_context={self.config.max_context}; raise it or remove the prompt"
            )
        reward, parts = await self.rewards.score(
            RewardInput(
                prompt=prompt,
                messages=outcome.messages,
                final_text=final_text(outcome.messages),
                finish_reason=outcome.finish_reason,
                num_tool_calls=outcome.num_tool_calls,
                num_tool_errors=outcome.num_tool_errors,
                num_turns=outcome.num_turns,
                token_ids=tuple(session.tokens),
                num_action_tokens=session.num_action_tokens,
                reward=outcome.reward,
                info=outcome.info,
            )
        )
        return session.finish(
            outcome,
            trajectory_id=trajectory_id,
            prompt_id=prompt.id,
            group_id=group_id,
            reward=reward,
            reward_parts=parts,
            queued_s=queued_s,
            metadata=bounded_json(prompt.metadata),
        )


def final_text(messages: tuple[Mapping[str, Any], ...]) -> str:
    """The last assistant message's text, or an empty string."""
    return next((str(m.get("content") or "") for m in reversed(messages) if m.get("role") == "assistant"), "")
