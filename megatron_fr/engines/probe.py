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
    """Generate a few tokens and check the answer.

    Raises:
        EngineError: the engine failed, or its routes are missing or wrong although ``want_routes`` is set.
    """
    prompt = [int(t) for t in np.linspace(1, limits.vocab_size - 1, _PROMPT_TOKENS)]
    for start in (0, _PROMPT_TOKENS // 2):
        completion = await client.generate(
            prompt,
            max_new_tokens=_NEW_TOKENS,
            routes_from=start if want_routes else None,
            ignore_eos=True,
            fresh=True,
        )
        if len(completion.token_ids) != _NEW_TOKENS:
            raise EngineError(
                f"engine {client.url}: the start-up probe asked for {_NEW_TOKENS} tokens and got "
                f"{len(completion.token_ids)}"
            )
        if want_routes and (reason := check_routes(completion, prompt_tokens=_PROMPT_TOKENS, start=start)):
            raise EngineError(f"engine {client.url}: {reason}; {_REMEDY}")


def check_routes(completion: Completion, *, prompt_tokens: int, start: int) -> str | None:
    """Why a completion's routes cannot be what the model used, or None.

    Shape, range and dtype were checked when the answer was read.
    """
    rows = completion.routes
    if rows is None:
        return completion.route_error or "the engine returned no routes"
    total = prompt_tokens + len(completion.token_ids) - 1
    if len(rows) not in (total - start, total):
        return f"the engine returned {len(rows)} rows of routes from row {start} on, expected {total - start}"
    ordered = np.sort(rows, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        return "a row of the engine's routes names an expert twice"
    decoded = rows[-(len(completion.token_ids) - 1) :]
    # Different tokens with equal rows in every layer mean that the engine did not write its buffer.
    if len(set(completion.token_ids[:-1])) > 1 and (decoded == decoded[0]).all():
        return f"the engine returned the same routes for all {len(decoded)} sampled tokens"
    return None
