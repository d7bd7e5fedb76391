"""The files on the path from a prompt to a weight update, in reading order, with their lines.

    python tools/count_path.py

docs/ARCHITECTURE.md tells the same path in ten steps. Not on it: configuration, reading of files, model building,
weight tables, the GRPO baseline, optional filters and hooks, metrics, checkpoints, the sandbox, and how
processes start.
"""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "megatron_fr"
#: Lines that the path may have, and the package.
MOST_ON_PATH, MOST_IN_PACKAGE = 5000, 14000

#: What happens, and the files that do it; the steps of docs/ARCHITECTURE.md.
STEPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("draw a prompt", ("rollout/cursor.py",)),
    ("let a rollout start", ("rollout/staleness.py",)),
    ("run many episodes", ("rollout/runner.py", "engines/fleet.py")),
    (
        "render the conversation and keep its tokens",
        ("agents/contract.py", "agents/python_tool.py", "agents/chat.py", "rollout/session.py"),
    ),
    ("sample tokens", ("engines/client.py",)),
    ("call tools", ("agents/tool_call.py",)),
    ("score, check and queue the trajectory", ("agents/rewards.py", "trajectory.py", "rollout/queue.py")),
    (
        "lease a batch and lay it out on the ranks",
        (
            "trainer/loop.py",
            "rollout/endpoints.py",
            "trainer/data/client.py",
            "trainer/data/loader.py",
            "trainer/data/packing.py",
            "trainer/data/batch.py",
            "models/layers/zigzag.py",
        ),
    ),
    (
        "take one step",
        (
            "trainer/step.py",
            "trainer/routing_replay.py",
            "trainer/logprob.py",
            "trainer/objective.py",
            "algorithm/advantage.py",
            "algorithm/tokens.py",
            "algorithm/trust_region.py",
            "algorithm/loss.py",
        ),
    ),
    (
        "push the weights",
        (
            "trainer/weight_push.py",
            "hf/export.py",
            "weight_sync/publisher.py",
            "weight_sync/transport.py",
            "weight_sync/engines.py",
            "weight_sync/broadcast.py",
            "weight_sync/buckets.py",
        ),
    ),
)


def count_lines(path: Path) -> int:
    """Lines of one file, blank ones and comments included."""
    return len(path.read_text(encoding="utf-8").splitlines())


def main() -> int:
    """Print the list and both sums; 1 when one is above its bound."""
    on_path = 0
    for number, (what, files) in enumerate(STEPS, 1):
        print(f"{number}. {what}")
        for name in files:
            lines = count_lines(PACKAGE / name)
            on_path += lines
            print(f"   {lines:5d}  megatron_fr/{name}")
    in_package = sum(map(count_lines, PACKAGE.rglob("*.py")))
    print(f"{on_path} lines on the path, at most {MOST_ON_PATH}")
    print(f"{in_package} lines in megatron_fr/, at most {MOST_IN_PACKAGE}")
    return int(on_path > MOST_ON_PATH or in_package > MOST_IN_PACKAGE)


if __name__ == "__main__":
    sys.exit(main())
