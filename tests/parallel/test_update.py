"""One FlashREINFORCE update through the trainer's own pieces, against transformers, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_launch import run_ranks
from update_case import Case
from update_ranks import Job, run_updates
from update_reference import Update
from update_scenario import OPTIMIZER

#: Largest error of a metric, relative: they are float64 sums of float32 log-probabilities.
METRIC_TOLERANCE = 2e-5
#: Largest error of a gradient, relative to the largest entry of its tensor: float32 sums in another order.
GRADIENT_TOLERANCE = 1e-4
#: Largest error of a weight after the step, relative to the learning rate, which is what a weight may move at most.
WEIGHT_TOLERANCE = 1e-3

#: (model, parallel, train); one set of processes each.
LAYOUTS: dict[int, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
    1: [
        ("moe", {}, {}),
        ("moe", {"distributed_optimizer": False}, {"micro_batch_size": 1}),
        ("moe", {}, {"micro_batch_size": 7}),
        ("moe", {}, {"recompute": "full", "micro_batch_size": 2}),
        ("dense", {"distributed_optimizer": False}, {}),
    ],
    2: [
        ("moe", {"tensor": 2}, {}),
        ("moe", {"expert": 2, "distributed_optimizer": False}, {}),
        ("moe", {}, {}),
        ("moe", {"pipeline": 2}, {}),
        ("dense", {"tensor": 2}, {}),
        ("dense", {"distributed_optimizer": False}, {}),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("world", LAYOUTS)
def test_one_update_equals_the_reference_in_every_layout(cases: dict[str, Case], world: int) -> None:
    layouts = LAYOUTS[world]
    jobs = [
        Job(cases[model].folder, parallel={"world_size": world, **parallel}, train=train)
        for model, parallel, train in layouts
    ]
    by_rank = run_ranks(run_updates, world, jobs=jobs)
    problems: list[str] = []
    for i, (model, parallel, train) in enumerate(layouts):
        problems += compare(f"{model} {parallel} {train}", by_rank[0][i], cases[model].wanted)
        for answers in by_rank:
            # One forward a micro-batch: gates, ratios and gradients all come out of it.
            assert answers[i]["model_calls"] == answers[i]["micro_batches"]
    assert not problems, "\n".join(problems)


def compare(name: str, found: dict[str, Any], wanted: Update) -> list[str]:
    """What of one layout's update is not the reference's."""
    problems = []
    for key, value in wanted.metrics.items():
        if found["metrics"].get(key) != pytest.approx(value, rel=METRIC_TOLERANCE, abs=1e-9):
            problems.append(f"{name}: {key} is {found['metrics'].get(key)}, not {value}")
    assert found["gradients"].keys() == wanted.gradients.keys()
    assert found["weights"].keys() == wanted.weights.keys()
    largest = max(float(g.abs().max()) for g in wanted.gradients.values())
    # Some tensors' gradients are 0 but for rounding (the bias of the keys shifts all scores alike).
    gradients = {
        k: _error(found["gradients"][k], g, max(float(g.abs().max()), 1e-3 * largest))
        for k, g in wanted.gradients.items()
    }
    weights = {k: _error(found["weights"][k], w, OPTIMIZER["lr"]) for k, w in wanted.weights.items()}
    print(f"{name}: gradients {max(gradients.values()):.2g}, weights {max(weights.values()):.2g}")
    for what, errors, tolerance in (
        ("gradient", gradients, GRADIENT_TOLERANCE),
        ("weight", weights, WEIGHT_TOLERANCE),
    ):
        wrong = {k: e for k, e in errors.items() if not e <= tolerance}
        if wrong:
            worst = max(wrong, key=wrong.__getitem__)
            problems.append(f"{name}: {len(wrong)} {what}s, {worst} by {wrong[worst]:.2g}")
    return problems


def _error(found: torch.Tensor, wanted: torch.Tensor, scale: float) -> float:
    return float((found.double() - wanted.double()).abs().max()) / scale
