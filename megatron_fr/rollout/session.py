"""One trajectory on one engine: its growing token sequence, and the episode that fills and scores it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_fr.agents.contract import Agent, Generation, Outcome, Prompt, RewardInput
from megatron_fr.agents.rewards import RewardRunner
from megatron_fr.config import RolloutConfig
from megatron_fr.engines.client import Completion, EngineClient
from megatron_fr.engines.fleet import Fleet
from megatron_fr.errors import AgentTimeoutError, EngineError, PromptTooLongError, TrajectoryError
from megatron_fr.trajectory import NO_VERSION, ModelLimits, Timings, Trajectory

# An engine that aborts again and again without producing a token will not produce one.
_MAX_EMPTY_ABORTS = 8
#: Of a prompt's metadata, and of an agent's info, that travel with a trajectory.
MAX_JSON_BYTES = 4096


@dataclass
class EngineSession:
    """Implements :class:`megatron_fr.agents.contract.TokenSession` on one engine, whose prefix cache holds past turns.

    Attributes:
        limits: ``max_context`` bounds all tokens.
        max_new_tokens: bound of the action tokens over all turns.
        want_routes: ask for routes and stitch the turns' rows together.
        temperature: of sampling; None is the run's own.
        probe: read nothing from the prefix cache and go on after end tokens, to see what the engine computes now.
    """

    client: EngineClient
    limits: ModelLimits
    max_new_tokens: int
    want_routes: bool
    temperature: float | None = None
    probe: bool = False
    tokens: list[int] = field(default_factory=list, init=False)
    num_action_tokens: int = field(default=0, init=False)
    _mask: list[bool] = field(default_factory=list, init=False)
    _logprobs: list[float] = field(default_factory=list, init=False)
    _versions: list[int] = field(default_factory=list, init=False)
    _routes: list[npt.NDArray[Any]] = field(default_factory=list, init=False)
    _rows: int = field(default=0, init=False)
    _route_error: str | None = field(default=None, init=False)
    _generating_s: float = field(default=0.0, init=False)

    @property
    def action_tokens_left(self) -> int:
        """How many tokens the policy may still sample."""
        return max(0, min(self.max_new_tokens - self.num_action_tokens, self.limits.max_context - len(self.tokens)))

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample; what no longer fits the context is left out."""
        kept = token_ids[: self.limits.max_context - len(self.tokens)]
        self._extend(kept, [0.0] * len(kept), [NO_VERSION] * len(kept), False)

    async def generate(self, *, stop_token_ids: Sequence[int], max_tokens: int | None = None) -> Generation:
        """Sample one turn after the tokens so far and append it.

        An aborted request (some ways of updating weights abort) keeps its tokens, and a new one goes on after them.
        An EngineError leaves the session as before the failing request.
        """
        budget = self.action_tokens_left if max_tokens is None else min(max_tokens, self.action_tokens_left)
        turn: list[int] = []
        empty_aborts = 0
        resumed = False
        while budget > len(turn):
            completion = await self._request(stop_token_ids, budget - len(turn), resumed)
            turn += completion.token_ids
            if completion.finish_reason != "aborted":
                return Generation(tuple(turn), completion.finish_reason)
            resumed = True
            empty_aborts = 0 if completion.token_ids else empty_aborts + 1
            if empty_aborts >= _MAX_EMPTY_ABORTS:
                return Generation(tuple(turn), "aborted")
        return Generation(tuple(turn), "length")

    def finish(self, outcome: Outcome, queued_s: float = 0.0, **fields: Any) -> Trajectory:
        """The trajectory so far, up to the last action token: what follows has neither loss nor routes.

        ``fields`` of :class:`Trajectory` that the session does not know: its ids, reward and metadata.
        """
        used = max((i for i, acted in enumerate(self._mask) if acted), default=len(self.tokens) - 1) + 1
        route_error = self._route_error
        if self._routes and route_error is None and self._rows != used - 1:
            route_error = f"{self._rows} rows for {used} tokens"
        routes = np.concatenate(self._routes) if self._routes and route_error is None else None
        return Trajectory(
            tokens=np.asarray(self.tokens[:used], dtype=np.int32),
            action_mask=np.asarray(self._mask[:used], dtype=np.bool_),
            behavior_logprobs=np.asarray(self._logprobs[:used], dtype=np.float32),
            versions=np.asarray(self._versions[:used], dtype=np.int32),
            routed_experts=routes,
            num_turns=outcome.num_turns,
            num_tool_calls=outcome.num_tool_calls,
            num_tool_errors=outcome.num_tool_errors,
            finish_reason=outcome.finish_reason,
            timings=Timings(queued_s, self._generating_s, outcome.tools_s),
            route_error=route_error,
            info=bounded_json(outcome.info),
            **fields,
        )

    async def _request(self, stop_token_ids: Sequence[int], max_new_tokens: int, resumed: bool) -> Completion:
        wanted = self.want_routes and self._route_error is None
        started = time.monotonic()
        try:
            completion = await self.client.generate(
                self.tokens,
                max_new_tokens=max_new_tokens,
                stop_token_ids=stop_token_ids,
                routes_from=self._rows if wanted else None,
                fresh=self.probe,
                # An abort leaves the token under way in SGLang's prefix cache. Once computed anew under newer weights,
                # its keys, values and routes would be replaced by those that the older ones left there.
                reuse_prefix=not resumed,
                ignore_eos=self.probe,
                temperature=self.temperature,
            )
        finally:
            self._generating_s += time.monotonic() - started
        if completion.token_ids:
            if wanted:
                self._stitch(completion)
            self._extend(completion.token_ids, completion.logprobs, completion.versions, True)
            self.num_action_tokens += len(completion.token_ids)
        return completion

    def _stitch(self, completion: Completion) -> None:
        """Append the rows of what this request processed: everything but its last token."""
        total = len(self.tokens) + len(completion.token_ids) - 1
        first, rows = self._rows, completion.routes
        if rows is None:
            self._route_error = completion.route_error or "the engine returned no routes"
        elif len(rows) in (total - first, total):  # an engine that ignores the start returns the whole prefix
            self._routes.append(rows[len(rows) - (total - first) :])
            self._rows = total
        else:
            self._route_error = f"the engine returned {len(rows)} rows from row {first} on, expected {total - first}"

    def _extend(self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], acted: bool) -> None:
        self.tokens += tokens
        self._mask += [acted] * len(tokens)
        self._logprobs += logprobs
        self._versions += versions


@dataclass(frozen=True)
class EpisodeRunner:
    """Runs episodes, any number at a time; holds what they share."""

    fleet: Fleet
    agent: Agent
    rewards: RewardRunner
    limits: ModelLimits
    config: RolloutConfig
    want_routes: bool
    timeout_s: float | None = None  # that the agent may take for one trajectory

    async def run(
        self,
        prompt: Prompt,
        *,
        trajectory_id: str,
        group_id: str,
        queued_s: float = 0,
        temperature: float | None = None,
    ) -> Trajectory:
        """Roll the prompt out on the least loaded engine and score it.

        Evaluations alone give a ``temperature``; None is the one that the trainer's logits are scaled by.

        Raises:
            AgentTimeoutError: the agent took longer than ``timeout_s``; what it asked of the engine is given up.
            EngineError: the engine failed, or aborted the generation for good.
            RewardError: the reward function failed.
            PromptTooLongError: the prompt leaves no token to sample.
            TrajectoryError: the policy sampled no token all the same.
        """
        with self.fleet.borrow() as client:
            session = EngineSession(
                client,
                self.limits,
                max_new_tokens=self.config.max_new_tokens,
                want_routes=self.want_routes,
                temperature=temperature,
            )
            try:
                async with asyncio.timeout(self.timeout_s) as limit:
                    outcome = await self.agent.rollout(prompt, session)
            except TimeoutError as error:
                if not limit.expired():  # the agent's own
                    raise
                raise AgentTimeoutError(
                    f"the agent took longer than agent.timeout_s={self.timeout_s:g} for trajectory {trajectory_id} "
                    f"(prompt {prompt.id!r})"
                ) from error
        if outcome.finish_reason == "aborted":
            raise EngineError(f"engine {client.url} aborted trajectory {trajectory_id} (prompt {prompt.id!r})")
        if session.num_action_tokens == 0:
            name = f"trajectory {trajectory_id} (prompt {prompt.id!r})"
            if session.action_tokens_left > 0:
                raise TrajectoryError(f"{name}: the policy sampled no token")
            raise PromptTooLongError(
                f"{name}: {len(session.tokens)} prompt tokens leave nothing to sample in rollout.max_context="
                f"{self.config.max_context}; raise it or remove the prompt"
            )
        said = (str(m.get("content") or "") for m in reversed(outcome.messages) if m.get("role") == "assistant")
        reward, parts = await self.rewards.score(
            RewardInput(
                prompt=prompt,
                messages=outcome.messages,
                final_text=next(said, ""),
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
            queued_s,
            id=trajectory_id,
            prompt_id=prompt.id,
            group_id=group_id,
            reward=reward,
            reward_parts=parts,
            metadata=bounded_json(prompt.metadata),
        )


def bounded_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` as JSON holds them (what it cannot hold becomes text), the smallest up to :data:`MAX_JSON_BYTES`."""
    encoded = {str(key): json.dumps(value, default=str) for key, value in values.items()}
    kept: dict[str, Any] = {}
    total = 0
    for key, text in sorted(encoded.items(), key=lambda item: len(item[1])):
        total += len(key) + len(text)
        if total > MAX_JSON_BYTES:
            break
        kept[key] = json.loads(text)
    return kept
