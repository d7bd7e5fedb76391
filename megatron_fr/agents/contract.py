"""What an agent is given, what it returns, and what a reward function sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_fr.trajectory import FinishReason


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
        """Append tokens that the policy did not sample.

        What no longer fits the context is dropped; no token can be sampled after it.
        """

    async def generate(self, *, stop_token_ids: Sequence[int], max_tokens: int | None = None) -> Generation:
        """Sample one turn after the tokens so far and append it.

        With no token left to sample it returns an empty generation with finish reason ``length``.
        """


#: A reward function's answer: a number, or named parts of which ``"reward"`` is the scalar to train on.
Reward = float | Mapping[str, float]


@dataclass(frozen=True)
class Outcome:
    """How a trajectory went, as far as its agent knows.

    Attributes:
        reward: of an environment that scores itself; None leaves it to ``reward.function``, which else sees it.
        info: free, JSON; reaches the reward function, the trajectory and the advantage function.
    """

    messages: tuple[Mapping[str, Any], ...]  # the whole conversation, for people and rewards
    finish_reason: FinishReason
    num_turns: int
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    tools_s: float = 0.0
    reward: Reward | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


class Agent(Protocol):
    """Turns one prompt into one trajectory. Instances are shared by all runners, so they hold no per-prompt state.

    A subclass takes ``(tokenizer, AgentConfig, **agent.args)``; it may leave :meth:`start` and :meth:`stop` out.
    """

    async def start(self) -> None:
        """Start what the agent needs (sandboxes). Called once, before any rollout."""

    async def rollout(self, prompt: Prompt, session: TokenSession) -> Outcome:
        """Run the conversation on ``session``."""

    async def stop(self) -> None:
        """End every process that :meth:`start` made."""


@dataclass(frozen=True)
class RewardInput:
    """What a reward function is called with, beside ``reward.args``; it returns a :data:`Reward`.

    Attributes:
        final_text: the last assistant message.
        token_ids: the whole trajectory, prompt and observations included.
        num_action_tokens: how many of them the policy sampled.
        reward: what the agent returned, or None.
        info: what the agent returned.
    """

    prompt: Prompt
    messages: tuple[Mapping[str, Any], ...]
    final_text: str
    finish_reason: FinishReason
    num_tool_calls: int
    num_tool_errors: int
    num_turns: int = 1
    token_ids: tuple[int, ...] = ()
    num_action_tokens: int = 0
    reward: Reward | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
