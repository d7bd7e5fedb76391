"""Reward functions that the reward tests run in real child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from megatron_fr.agents.contract import RewardInput

NOT_CALLABLE = 3
_calls = 0  # in this process, since the import


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
    global _calls
    _calls += 1
    match episode.final_text:
        case "raise":
            raise ValueError("this is not a number")
        case "hang":
            time.sleep(600)
        case "die":
            os._exit(5)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            sys.exit(3)
        case "huge":
            return 10**400
        case "program":
            subprocess.run(["sleep", "600.125"], check=True)
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
            return {"reward": 0.0, "pid": os.getpid(), "calls": _calls, "key": float(os.environ["REWARD_TEST_KEY"])}
    return 1
