"""The batch on which every layout is compared, and the switches of the update that trains on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from megatron_fr.trajectory import NO_VERSION, Trajectory

#: (tokens, spans of action tokens, reward, what is special). Seven: they divide over two ranks unevenly.
SHAPES: list[tuple[int, list[tuple[int, int]], float, str]] = [
    (30, [(8, 14), (18, 21), (25, 30)], 1.0, ""),
    (17, [(5, 9), (11, 17)], 0.5, ""),
    (121, [(10, 50), (60, 121)], 0.0, "long"),
    (22, [(4, 12), (15, 20)], 0.0, "rejected"),
    (26, [(6, 26)], 1.0, "no routes"),
    (9, [(3, 4)], 0.0, "one action"),
    (41, [(9, 20), (30, 41)], 0.0, ""),
]
DELTA = 1e-3
TEMPERATURE = 0.8
FAILURE_QUANTILE = 0.6

#: Adam's first step is lr * g / (|g| + eps). An eps of the gradients' size keeps it smooth: with 1e-8 it would be a
#: sign, and a gradient of 1e-9 with rounding errors of 1e-9 would decide it.
OPTIMIZER: dict[str, Any] = {
    "lr": 1e-2,
    "eps": 1e-3,
    "beta2": 0.95,
    "weight_decay": 0.1,
    "clip_grad": 0.02,
    "schedule": "constant",
    "warmup_fraction": 0.0,
}
ALGORITHM: dict[str, Any] = {
    "name": "flash_reinforce",
    "delta": DELTA,
    "failure_token_quantile": FAILURE_QUANTILE,
}


def make_trajectories(
    vocab_size: int,
    routes: tuple[int, int, int] | None,
    policy: Callable[[list[Trajectory]], list[np.ndarray]],
    *,
    seed: int = 3,
) -> list[Trajectory]:
    """Random tokens and routes, with behavior log-probabilities near those of ``policy``.

    Args:
        routes: layers, top-k and experts; None for dense models.
        policy: log-probabilities ``[N - 1]`` of each trajectory's own next tokens.

    The routes are random, hence unlike what the live router chooses. The rejected trajectory was sampled by a policy
    that gave its tokens e^3 times the probability.
    """
    generator = np.random.default_rng(seed)
    made: list[Trajectory] = []
    for index, (n, spans, reward, special) in enumerate(SHAPES):
        mask = np.zeros(n, dtype=np.bool_)
        for start, stop in spans:
            mask[start:stop] = True
        experts = None
        if routes is not None and special != "no routes":
            layers, top_k, num = routes
            scores = generator.random((n - 1, layers, num))
            experts = scores.argsort(-1)[..., :top_k].astype(np.uint8)
        made.append(
            Trajectory(
                id=f"t{index}",
                prompt_id=f"p{index}",
                group_id=f"t{index}",
                tokens=generator.integers(0, vocab_size, n).astype(np.int32),
                action_mask=mask,
                behavior_logprobs=np.zeros(n, dtype=np.float32),
                versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
                reward=reward,
                routed_experts=experts,
            )
        )
    for trajectory, logprobs, (_, _, _, special) in zip(made, policy(made), SHAPES, strict=True):
        shift = 3.0 if special == "rejected" else 0.0
        noisy = logprobs + shift + 0.2 * generator.standard_normal(len(logprobs))
        trajectory.behavior_logprobs[1:] = np.where(trajectory.action_mask[1:], np.minimum(noisy, -1e-3), 0.0)
    return made
