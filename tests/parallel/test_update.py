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
OF_THE_CHECK = ("policy/logprob_diff_without_replay", "policy/replay_logprob_change")
#: Largest error of a gradient, relative to the largest entry of its tensor: float32 sums in another order.
GRADIENT_TOLERANCE = 2e-5
#: Largest error of a weight after the step, relative to the learning rate, which is what a weight may move at most.
WEIGHT_TOLERANCE = 5e-5

PACKED = {"max_tokens_per_micro_batch": 70}
FULL = {"recompute": "full"}
SELECTIVE = {"recompute": "selective"}
PLAIN = {"distributed_optimizer": False}
#: One more forward, with the live router, before the update.
CHECK = {"replay_check_every": 1}

#: (model, parallel, train); one set of processes each. Every pair of features meets at least once.
LAYOUTS: dict[int, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
    1: [
        ("moe", {}, CHECK),
        ("moe", PLAIN, {"micro_batch_size": 1, **SELECTIVE}),
        ("moe", {}, {"micro_batch_size": 7, **FULL}),
        ("moe", {}, PACKED | FULL | CHECK),
        ("moe", {}, {"logprob_mode": "recompute", "logprob_chunk_tokens": 16}),
        ("moe_live", {}, {"routing_replay": "record", **FULL, **CHECK}),
        ("dense", PLAIN, PACKED | SELECTIVE),
        ("dense", {}, {}),
    ],
    2: [
        ("moe", {"tensor": 2}, {"micro_batch_size": 1, **CHECK}),
        ("moe", {"tensor": 2, **PLAIN}, PACKED | FULL),
        ("moe", {"expert": 2, **PLAIN}, FULL | CHECK),
        ("moe", {}, {"micro_batch_size": 1}),
        ("moe", PLAIN, PACKED | CHECK),
        ("moe", {"pipeline": 2, **PLAIN}, FULL),
        ("moe", {"pipeline": 2, "virtual_pipeline": 2}, PACKED | FULL | CHECK),
        ("moe", {"context": 2}, {}),
        ("moe", {"context": 2, **PLAIN}, PACKED | FULL | CHECK),
        ("dense", {"tensor": 2}, SELECTIVE),
        ("dense", {"tensor": 2, "sequence_parallel": True}, PACKED),
        ("dense", {"context": 2}, SELECTIVE | {"micro_batch_size": 7}),
        ("dense", {"pipeline": 2, "virtual_pipeline": 2}, {"micro_batch_size": 1}),
        ("dense", PLAIN, {}),
    ],
    4: [
        ("moe", {"tensor": 2, "expert": 2}, FULL | CHECK),
        ("moe", {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}, {"micro_batch_size": 2, **CHECK}),
        ("moe", {"tensor": 2, "context": 2}, PACKED | FULL),
        ("moe", {"expert": 2, "context": 2, **PLAIN}, {}),
        ("moe", {"pipeline": 2, "context": 2}, SELECTIVE | CHECK),
        ("moe", {"context": 2}, {"micro_batch_size": 1}),
        ("moe", {"tensor": 2, **PLAIN}, {}),
        ("moe", {"pipeline": 2, "expert": 2}, PACKED | CHECK),
        ("dense", {"tensor": 2, "context": 2}, {}),
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
        checked = model == "moe" and train.items() >= CHECK.items()
        problems += compare(f"{model} {parallel} {train}", by_rank[0][i], cases[model].wanted, checked=checked)
        for answers in by_rank:
            # One forward of each model chunk a micro-batch: gates, ratios and gradients all come out of it.
            assert set(answers[i]["model_calls"]) == {answers[i]["micro_batches"] * (2 if checked else 1)}
    assert not problems, "\n".join(problems)


def compare(name: str, found: dict[str, Any], wanted: Update, *, checked: bool = False) -> list[str]:
    """What of one layout's update is not the reference's.

    Args:
        checked: what replay changes was measured.
    """
    problems = []
    for key, value in wanted.metrics.items():
        if key in OF_THE_CHECK and not checked:
            assert key not in found["metrics"]
        elif found["metrics"].get(key) != pytest.approx(value, rel=METRIC_TOLERANCE, abs=1e-9):
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
