"""The growing token sequence of one trajectory on one engine."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_fr.agents.contract import Generation, Outcome
from megatron_fr.engines.client import Completion, EngineClient
from megatron_fr.trajectory import NO_VERSION, ModelLimits, Timings, Trajectory

# An engine that aborts again and again without producing a token will not produce one.
_MAX_EMPTY_ABORTS = 8
#: Of a prompt's metadata, and of an agent's info, that travel with a trajectory.
MAX_JSON_BYTES = 4096


class EngineSession:
    """Implements :class:`megatron_fr.agents.contract.TokenSession`.

    A trajectory stays on its engine, whose prefix cache holds its earlier turns.

    Args:
        client: of the engine.
        limits: the model's sizes; ``max_context`` bounds all tokens.
        max_new_tokens: bound of the action tokens over all turns.
        want_routes: ask for routes and stitch the turns' rows together.
        temperature: of sampling; None is the run's own.
        probe: read nothing from the prefix cache and go on after end tokens, to see what the engine computes now.
    """

    def __init__(
        self,
        client: EngineClient,
        limits: ModelLimits,
        *,
        max_new_tokens: int,
        want_routes: bool,
        temperature: float | None = None,
        probe: bool = False,
    ) -> None:
        self._client = client
        self._limits = limits
        self._max_new_tokens = max_new_tokens
        self._want_routes = want_routes
        self._temperature = temperature
        self._probe = probe
        self._tokens: list[int] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._routes: list[npt.NDArray[Any]] = []
        self._rows = 0
        self._route_error: str | None = None
        self._num_actions = 0
        self._generating_s = 0.0

    @property
    def tokens(self) -> Sequence[int]:
        """All tokens so far."""
        return self._tokens

    @property
    def action_tokens_left(self) -> int:
        """How many tokens the policy may still sample."""
        return max(0, min(self._max_new_tokens - self._num_actions, self._limits.max_context - len(self._tokens)))

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample; what no longer fits the context is left out."""
        kept = list(token_ids[: self._limits.max_context - len(self._tokens)])
        self._extend(kept, acted=False, logprobs=[0.0] * len(kept), versions=[NO_VERSION] * len(kept))

    async def generate(self, *, stop_token_ids: Sequence[int], max_tokens: int | None = None) -> Generation:
        """Sample one turn after the tokens so far and append it.

        When the engine aborts the request (as some ways of updating weights do), its tokens are kept and the turn goes
        on with a new request.

        Raises:
            EngineError: the engine failed; the session is as before the failing request.
        """
        budget = self.action_tokens_left if max_tokens is None else min(max_tokens, self.action_tokens_left)
        turn: list[int] = []
        empty_aborts = 0
        aborted = False
        while budget > len(turn):
            completion = await self._request(stop_token_ids, budget - len(turn), resumed=aborted)
            turn += completion.token_ids
            if completion.finish_reason != "aborted":
                return Generation(tuple(turn), completion.finish_reason)
            aborted = True
            empty_aborts = 0 if completion.token_ids else empty_aborts + 1
            if empty_aborts >= _MAX_EMPTY_ABORTS:
                return Generation(tuple(turn), "aborted")
        return Generation(tuple(turn), "length")

    @property
    def num_action_tokens(self) -> int:
        """Tokens sampled so far."""
        return self._num_actions

    def finish(
        self,
        outcome: Outcome,
        *,
        trajectory_id: str,
        prompt_id: str,
        group_id: str,
        reward: float,
        reward_parts: Mapping[str, float],
        queued_s: float = 0.0,
        metadata: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """The trajectory so far.

        Observations after the last action token are left out: no loss depends on them, and the model never processed
        them, so they have no routes.
        """
        used = max((i for i, acted in enumerate(self._mask) if acted), default=len(self._tokens) - 1) + 1
        routes, route_error = self._stitched(used)
        return Trajectory(
            id=trajectory_id,
            prompt_id=prompt_id,
            group_id=group_id,
            tokens=np.asarray(self._tokens[:used], dtype=np.int32),
            action_mask=np.asarray(self._mask[:used], dtype=np.bool_),
            behavior_logprobs=np.asarray(self._logprobs[:used], dtype=np.float32),
            versions=np.asarray(self._versions[:used], dtype=np.int32),
            reward=reward,
            routed_experts=routes,
            reward_parts=dict(reward_parts),
            num_turns=outcome.num_turns,
            num_tool_calls=outcome.num_tool_calls,
            num_tool_errors=outcome.num_tool_errors,
            finish_reason=outcome.finish_reason,
            timings=Timings(queued_s, self._generating_s, outcome.tools_s),
            route_error=route_error,
            metadata=dict(metadata or {}),
            info=bounded_json(outcome.info),
        )

    async def _request(self, stop_token_ids: Sequence[int], max_new_tokens: int, *, resumed: bool) -> Completion:
        wanted = self._want_routes and self._route_error is None
        started = time.monotonic()
        try:
            completion = await self._client.generate(
                self._tokens,
                max_new_tokens=max_new_tokens,
                stop_token_ids=stop_token_ids,
                routes_from=self._rows if wanted else None,
                fresh=self._probe,
                # An abort leaves the token under way in SGLang's prefix cache. Once computed anew under newer weights,
                # its keys, values and routes would be replaced by those that the older ones left there.
                reuse_prefix=not resumed,
                ignore_eos=self._probe,
                temperature=self._temperature,
            )
        finally:
            self._generating_s += time.monotonic() - started
        if completion.token_ids:
            if wanted:
                self._stitch(completion)
            self._extend(completion.token_ids, acted=True, logprobs=completion.logprobs, versions=completion.versions)
            self._num_actions += len(completion.token_ids)
        return completion

    def _stitch(self, completion: Completion) -> None:
        """Append the rows of what this request processed: everything but its last token."""
        total = len(self._tokens) + len(completion.token_ids) - 1
        rows = completion.routes
        if rows is None:
            self._drop_routes(completion.route_error or "the engine returned no routes")
        elif len(rows) == total - self._rows:
            self._routes.append(rows)
            self._rows = total
        elif len(rows) == total:  # the engine ignored the start and returned the whole prefix
            self._routes.append(rows[self._rows :])
            self._rows = total
        else:
            self._drop_routes(
                f"the engine returned {len(rows)} rows from row {self._rows} on, expected {total - self._rows}"
            )

    def _stitched(self, num_tokens: int) -> tuple[npt.NDArray[Any] | None, str | None]:
        if not self._want_routes or self._route_error is not None or not self._routes:
            return None, self._route_error
        routes = np.concatenate(self._routes)
        if len(routes) != num_tokens - 1:
            return None, f"{len(routes)} rows for {num_tokens} tokens"
        return routes, None

    def _drop_routes(self, reason: str) -> None:
        self._route_error = reason
        self._routes = []

    def _extend(
        self, token_ids: Sequence[int], *, acted: bool, logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        self._tokens += token_ids
        self._mask += [acted] * len(token_ids)
        self._logprobs += logprobs
        self._versions += versions


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
