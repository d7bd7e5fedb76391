"""The child's side of a reward call: rebuild the input from JSON, call the function, check what it returns."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from megatron_fr.agents.contract import Prompt, RewardInput
from megatron_fr.runtime.importing import import_object

FIELD = "reward.function"


def is_async(function: str) -> bool:
    """Whether ``module:name`` is an ``async def``.

    Raises:
        ConfigError: it cannot be imported.
    """
    return inspect.iscoroutinefunction(import_object(function, FIELD))


def score(function: str, args: Mapping[str, Any], episode: dict[str, Any]) -> dict[str, float]:
    """Call ``module:name`` on the rebuilt :class:`RewardInput`; see :func:`named_parts` for what comes back."""
    prompt = episode["prompt"] | {"messages": tuple(episode["prompt"]["messages"])}
    tuples = {name: tuple(episode[name]) for name in ("messages", "token_ids")}
    given = RewardInput(**{**episode, **tuples, "prompt": Prompt(**prompt)})
    return named_parts(import_object(function, FIELD)(given, **args), function)


def named_parts(answer: Any, source: str) -> dict[str, float]:
    """What a reward function or an agent returned, as named parts that hold ``"reward"``.

    Raises:
        TypeError, ValueError: it is neither a finite float nor a mapping of them.
    """
    if answer is None:
        raise TypeError(f"{source} returned None; return a number, or named parts with 'reward'")
    parts = dict(answer) if isinstance(answer, Mapping) else {"reward": answer}
    if "reward" not in parts:
        raise ValueError(f"{source} returned the parts {sorted(parts)} without 'reward'")
    if taken := {"mean", "pass"} & parts.keys():
        raise ValueError(f"{source} returned the parts {sorted(taken)}, metrics of the reward itself; rename them")
    checked = {str(key): float(value) for key, value in parts.items()}
    for key, value in checked.items():
        if not math.isfinite(value):
            raise ValueError(f"{source} returned {key}={value}")
    return checked
