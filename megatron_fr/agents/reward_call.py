"""The child's side of a reward call: rebuild the input from JSON, call the function, check what it returns."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

from megatron_fr.agents.contract import Prompt, RewardInput


def score(function: str, episode: dict[str, Any]) -> dict[str, float]:
    """Call ``module:name`` on the rebuilt :class:`RewardInput`; the parts always hold ``"reward"``.

    Raises:
        TypeError, ValueError: the function returned something else than a finite float or a mapping of them.
    """
    module, _, name = function.partition(":")
    target = getattr(importlib.import_module(module), name)
    prompt = episode["prompt"]
    answer = target(
        RewardInput(
            prompt=Prompt(prompt["id"], tuple(prompt["messages"]), prompt["answer"], prompt["metadata"]),
            messages=tuple(episode["messages"]),
            final_text=episode["final_text"],
            finish_reason=episode["finish_reason"],
            num_tool_calls=episode["num_tool_calls"],
            num_tool_errors=episode["num_tool_errors"],
        )
    )
    parts = dict(answer) if isinstance(answer, Mapping) else {"reward": answer}
    if "reward" not in parts:
        raise ValueError(f"{function} returned the parts {sorted(parts)} without 'reward'")
    checked = {str(key): float(value) for key, value in parts.items()}
    for key, value in checked.items():
        if not math.isfinite(value):
            raise ValueError(f"{function} returned {key}={value}")
    return checked
