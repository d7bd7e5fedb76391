"""The batches on which every layout is compared, and the switches of the updates that train on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_fr.trajectory import NO_VERSION, Trajectory

#: (tokens, spans of action tokens, reward, what is special). Seven: they divide over two ranks unevenly. Each has
#: another number of action tokens, by which a row of a micro-batch is known again.
SHAPES: list[tuple[int, list[tuple[int, int]], float, str]] = [
    (30, [(8, 14), (18, 21), (25, 30)], 1.0, ""),
    (17, [(5, 9), (11, 17)], 0.5, ""),
    (121, [(10, 50), (60, 121)], 0.0, "long"),
    (22, [(4, 12), (15, 20)], 0.0, "rejected"),
    (26, [(6, 26)], 1.0, "no routes"),
    (9, [(3, 4)], 0.0, "one action"),
    (41, [(9, 20), (30, 41)], 0.0, ""),
]
#: Two more, for three groups of three: one of mixed rewards, one with a single success, one of equal rewards.
GROUPED = [*SHAPES, (33, [(5, 21)], 0.0, ""), (12, [(4, 11)], 0.0, "")]
TEMPERATURE = 0.8

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


@dataclass(frozen=True)
class Scenario:
    """A model and an objective.

    Attributes:
        model: arguments of ``make_untrained``.
        algorithm: fields of the configuration's section.
        replay: whether trajectories have routes.
        shapes: of the batch.
        own_loss: the configuration's section, where functions of one's own must do what ``algorithm`` says.
    """

    model: dict[str, Any]
    algorithm: dict[str, Any]
    replay: bool = False
    shapes: list[tuple[int, list[tuple[int, int]], float, str]] = field(default_factory=lambda: SHAPES)
    own_loss: dict[str, Any] | None = None


#: Vocabulary 515 is odd, so that TP 2 needs a padding row; four layers make two virtual stages on two ranks.
MOE = {"family": "qwen3_moe", "num_layers": 4, "vocab_size": 515}
GLM = {"family": "glm4_moe", "num_layers": 4, "vocab_size": 515}
DENSE = {"family": "qwen2", "num_layers": 4, "vocab_size": 515}
FLASH = {"name": "flash_reinforce", "delta": 1e-3, "failure_token_quantile": 0.6, "failure_threshold": 0.5}
SCENARIOS: dict[str, Scenario] = {
    "moe": Scenario(MOE, FLASH, replay=True),
    "moe_live": Scenario(MOE, FLASH),  # nothing to replay
    "glm": Scenario(GLM, FLASH, replay=True),
    "dense": Scenario(DENSE, FLASH),
    "grpo": Scenario(
        MOE, {"name": "grpo", "group_size": 3, "clip_low": 0.2, "clip_high": 0.25}, replay=True, shapes=GROUPED
    ),
    "token": Scenario(DENSE, FLASH | {"reduction": "token_mean", "admission": "token", "delta": 2e-5}),
    "own_loss": Scenario(
        MOE,
        FLASH | {"failure_token_quantile": 1.0},
        replay=True,
        own_loss={
            "loss": "tests.support.own_algorithm:published_loss",
            "loss_args": {"delta": 1e-3},
            "advantage": "tests.support.own_algorithm:baseline_advantages",
        },
    ),
    "truncated": Scenario(DENSE, FLASH | {"importance": "truncated", "truncation": 1.15, "advantage": "leave_one_out"}),
}


def make_trajectories(
    scenario: Scenario,
    vocab_size: int,
    routes: tuple[int, int, int] | None,
    policy: Callable[[list[Trajectory]], list[np.ndarray]],
    *,
    seed: int = 3,
) -> list[Trajectory]:
    """Random tokens and routes, with behavior log-probabilities near those of ``policy``.

    Args:
        scenario: its shapes and group size.
        routes: layers, top-k and experts; None for dense models.
        policy: log-probabilities ``[N - 1]`` of each trajectory's own next tokens.

    The routes are random, hence unlike what the live router chooses. The rejected trajectory was sampled by a policy
    that gave its tokens e^3 times the probability.
    """
    generator = np.random.default_rng(seed)
    group_size = scenario.algorithm.get("group_size", 1)
    made: list[Trajectory] = []
    for index, (n, spans, reward, special) in enumerate(scenario.shapes):
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
                group_id=f"g{index // group_size}",
                tokens=generator.integers(0, vocab_size, n).astype(np.int32),
                action_mask=mask,
                behavior_logprobs=np.zeros(n, dtype=np.float32),
                versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
                reward=reward,
                routed_experts=experts,
            )
        )
    for trajectory, logprobs, (_, _, _, special) in zip(made, policy(made), scenario.shapes, strict=True):
        shift = 3.0 if special == "rejected" else 0.0
        noisy = logprobs + shift + 0.2 * generator.standard_normal(len(logprobs))
        trajectory.behavior_logprobs[1:] = np.where(trajectory.action_mask[1:], np.minimum(noisy, -1e-3), 0.0)
    assert len({t.num_action_tokens for t in made}) == len(made)
    return made
