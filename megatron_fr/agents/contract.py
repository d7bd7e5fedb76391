"""What an agent is given, what it returns, and what a reward function sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_fr.trajectory import FinishReason

#: A reward function's answer: a number, or named parts of which ``"reward"`` is the scalar to train on.
Reward = float | Mapping[str, float]


@dataclass(frozen=True)
class Prompt:
    """One line of the data: chat messages, the reference answer, and free metadata."""

    id: str
    messages: tuple[Mapping[str, Any], ...]
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Generation:
    """The action tokens of one turn. A matched stop token is the last of ``token_ids``."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason  # "stop", "length" or "aborted"


class TokenSession(Protocol):
    """The growing token sequence of one trajectory: tokens in, tokens out, never re-tokenised."""

    @property
    def tokens(self) -> Sequence[int]:
        """All tokens so far."""

    @property
    def action_tokens_left(self) -> int:
        """How many tokens the policy may still sample, by the trajectory's and the context's limits."""

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample; what no longer fits the context is dropped and ends it."""

    async def generate(self, *, stop_token_ids: Sequence[int], max_tokens: int | None = None) -> Generation:
        """Sample one turn and append it; with no token left it is empty, with finish reason ``length``."""


@dataclass(frozen=True)
class Outcome:
    """How a trajectory went, as far as its agent knows."""

    messages: tuple[Mapping[str, Any], ...]  # the whole conversation, for people and rewards
    finish_reason: FinishReason
    num_turns: int
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    tools_s: float = 0.0
    reward: Reward | None = None  # of an environment that scores itself; a reward function overrules it
    info: Mapping[str, Any] = field(default_factory=dict)  # free, JSON; rewards, trajectories and advantages see it


class Agent(Protocol):
    """Turns one prompt into one trajectory. Instances are shared by all runners, so they hold no per-prompt state.

    A subclass takes ``(tokenizer, AgentConfig, **agent.args)``; it may leave all but :meth:`rollout` out.
    """

    async def start(self) -> None:
        """Start what the agent needs (sandboxes). Called once, before any rollout."""

    async def rollout(self, prompt: Prompt, session: TokenSession) -> Outcome:
        """Run the conversation on ``session``."""

    async def stop(self) -> None:
        """End every process that :meth:`start` made."""

    def metrics(self) -> Mapping[str, float]:
        """Figures of the agent as a whole, for each update's row."""
        return {}


@dataclass(frozen=True)
class RewardInput:
    """What a reward function is called with, beside ``reward.args``; it returns a :data:`Reward`."""

    prompt: Prompt
    messages: tuple[Mapping[str, Any], ...]
    final_text: str  # the last assistant message
    finish_reason: FinishReason
    num_tool_calls: int
    num_tool_errors: int
    num_turns: int = 1
    token_ids: tuple[int, ...] = ()  # the whole trajectory, prompt and observations included
    num_action_tokens: int = 0  # how many of them the policy sampled
    reward: Reward | None = None  # what the agent returned, as is info
    info: Mapping[str, Any] = field(default_factory=dict)
