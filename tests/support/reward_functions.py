"""Reward functions that the reward tests run in real child processes."""

from __future__ import annotations

import os
import time
from typing import Any

from megatron_fr.agents.contract import RewardInput

NOT_CALLABLE = 3


def echo(episode: RewardInput, *, weight: float = 1.0) -> dict[str, float]:
    """Proves that every field arrives as it was sent."""
    assert episode.prompt.messages[0]["content"] == "hé?"
    assert isinstance(episode.messages, tuple)
    assert episode.prompt.metadata == {"level": [1, None]}
    assert episode.finish_reason == "length"
    assert isinstance(episode.token_ids, tuple)
    assert episode.reward == {"reward": 0.25}
    return {
        "weight": weight,
        "tokens": sum(episode.token_ids),
        "acted": episode.num_action_tokens,
        "turns": episode.num_turns,
        "seed": episode.info["seed"],
        "reward": float(episode.final_text),
        "calls": episode.num_tool_calls,
        "errors": float(episode.num_tool_errors),
        "answer": episode.prompt.answer,
    }


def by_text(episode: RewardInput) -> Any:
    """Does what the final text says."""
    match episode.final_text:
        case "raise":
            raise ValueError("this is not a number")
        case "hang":
            time.sleep(600)
        case "die":
            os._exit(5)
        case "nan":
            return float("nan")
        case "none":
            return None
        case "taken name":
            return {"reward": 1.0, "pass": 1.0}
        case "no reward":
            return {"score": 1.0}
        case "slow":
            time.sleep(0.5)
            return 0.25
        case "pid":
            return {"reward": 0.0, "pid": os.getpid(), "key": float(os.environ["REWARD_TEST_KEY"])}
    return 1
