"""Start-up check of an engine: one short generation must answer what training needs."""

from __future__ import annotations

import numpy as np

from megatron_fr.engines.client import Completion, EngineClient
from megatron_fr.errors import EngineError
from megatron_fr.trajectory import ModelLimits

_PROMPT_TOKENS = 12
_NEW_TOKENS = 8
_REMEDY = (
    "train.routing_replay=rollout needs them: leave rollout.engine_args.enable-return-routed-experts on, use an SGLang "
    "release that returns them, or set train.routing_replay=off"
)


async def probe_engine(client: EngineClient, limits: ModelLimits, *, want_routes: bool) -> None:
    """Generate a few tokens; raise EngineError where the engine fails, or where wanted routes are missing or wrong."""
    prompt = [int(t) for t in np.linspace(1, limits.vocab_size - 1, _PROMPT_TOKENS)]
    for start in (0, _PROMPT_TOKENS // 2):
        routes_from = start if want_routes else None
        completion = await client.generate(
            prompt, max_new_tokens=_NEW_TOKENS, routes_from=routes_from, ignore_eos=True, fresh=True
        )
        if (got := len(completion.token_ids)) != _NEW_TOKENS:
            raise EngineError(f"engine {client.url}: the start-up probe asked for {_NEW_TOKENS} tokens and got {got}")
        if want_routes and (reason := _find_wrong_routes(completion, start)):
            raise EngineError(f"engine {client.url}: {reason}; {_REMEDY}")


def _find_wrong_routes(completion: Completion, start: int) -> str | None:
    """Why a completion's routes cannot be what the model used; the client has checked their shape and range."""
    rows = completion.routes
    if rows is None:
        return completion.route_error
    total = _PROMPT_TOKENS + len(completion.token_ids) - 1
    if len(rows) not in (total - start, total):
        return f"the engine returned {len(rows)} rows of routes from row {start} on, expected {total - start}"
    if (np.diff(np.sort(rows, axis=-1)) == 0).any():
        return "a row of the engine's routes names an expert twice"
    # Different tokens with equal rows in every layer mean that the engine did not write its buffer.
    decoded = rows[-(len(completion.token_ids) - 1) :]
    if len(set(completion.token_ids[:-1])) > 1 and (decoded == decoded[0]).all():
        return f"the engine returned the same routes for all {len(decoded)} sampled tokens"
    return None
