"""Valid trajectories made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_fr.trajectory import Trajectory


def trajectory(name: str, version: int = 0, *, group: str | None = None, **changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "id": name,
        "prompt_id": f"prompt-{name}",
        "group_id": group or name,
        "tokens": np.array([1, 2, 3, 4], np.int32),
        "action_mask": np.array([False, False, True, True]),
        "behavior_logprobs": np.array([0, 0, -1, -2], np.float32),
        "versions": np.array([-1, -1, version, version + 1], np.int32),
        "reward": 1.0,
    }
    return Trajectory(**{**fields, **changes})
