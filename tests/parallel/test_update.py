"""One update through the trainer's own pieces, in every layout, against transformers and against one plain process."""

from __future__ import annotations

import pytest
import torch

from tests.support.update_case import Case
from tests.support.update_layouts import CHECK, LAYOUTS, missing_pairs
from tests.support.update_ranks import Answers, joined_update
from tests.support.update_reference import Update
from tests.support.update_scenario import OPTIMIZER

# The same against the reference in float64 and against one float32 process: that one's own rounding is as large as a
# layout's, which forms the same sums in another order. Each is two to three times the largest error seen.
#: Largest error of a metric or of a trajectory's sequence KL, relative: float64 sums of float32 log-probabilities.
METRIC_TOLERANCE = 2e-5
#: Largest error of a sequence KL, absolute: with one action token, the last places of its float32 log-probability are
#: more than the relative tolerance of a small KL.
KL_TOLERANCE = 3e-10
OF_THE_CHECK = ("policy/train_rollout_logprob_diff_without_replay", "policy/replay_logprob_change")
#: Largest error of the loss, absolute: a float32 sum of terms near 1, which may cancel.
LOSS_TOLERANCE = 2e-7
#: Largest error of a gradient, relative to the largest entry of its tensor.
GRADIENT_TOLERANCE = 1e-5
#: Largest error of a weight after the step, relative to the learning rate, which is what a weight may move at most. One
#: unit in the last place of a norm's weight, near 1, is 1.2e-5 of it.
WEIGHT_TOLERANCE = 3e-5


@pytest.mark.parametrize("model", ["moe", "dense"])
def test_every_pair_of_features_meets_in_some_layout(model: str) -> None:
    layouts = [(world, layout) for world, group in LAYOUTS.items() for layout in group]
    assert not missing_pairs(model, layouts)


@pytest.mark.slow
@pytest.mark.parametrize("world", LAYOUTS)
def test_one_update_equals_the_reference_in_every_layout(
    cases: dict[str, Case], answers: Answers, one_process: dict[str, Update], world: int
) -> None:
    problems: list[str] = []
    for (scenario, parallel, train), ranks in zip(LAYOUTS[world], answers(world)["compared"], strict=True):
        name = f"{scenario} {parallel} {train}"
        found = joined_update(ranks)
        checked = scenario in ("moe", "glm", "grpo") and train.items() >= CHECK.items()
        problems += compare(f"{name}, reference", found, cases[scenario].wanted, checked=checked)
        problems += compare(f"{name}, one process", found, one_process[scenario])
        if scenario == "own_loss":
            # What the loss returned beside itself, summed over micro-batches and ranks.
            assert found.metrics["loss/token_share"] == pytest.approx(1.0, abs=1e-6)
            assert found.metrics["loss/loss_again"] == pytest.approx(found.metrics["train/loss"], rel=1e-6)
        for answer in ranks:
            # One forward of each model chunk a micro-batch: gates, ratios and gradients all come out of it.
            assert set(answer["model_calls"]) == {answer["micro_batches"] * (2 if checked else 1)}
    assert not problems, "\n".join(problems)


def compare(name: str, found: Update, wanted: Update, *, checked: bool = False) -> list[str]:
    """What of one layout's update is not as wanted.

    Args:
        checked: what replay changes was measured.
    """
    problems = []
    worst_metric = 0.0
    for key, value in wanted.metrics.items():
        here = found.metrics.get(key)
        if key in OF_THE_CHECK and not checked:
            assert here is None
            continue
        floor = LOSS_TOLERANCE if key == "train/loss" else 1e-9
        if here != pytest.approx(value, rel=METRIC_TOLERANCE, abs=floor):
            problems.append(f"{name}: {key} is {here}, not {value}")
        if here is not None:
            worst_metric = max(worst_metric, abs(here - value) / max(abs(value), 1e-4))
    assert found.decisions.keys() == wanted.decisions.keys()
    for tokens, decision in wanted.decisions.items():
        seen = found.decisions[tokens]
        if seen.admitted != decision.admitted or seen.sequence_kl != pytest.approx(
            decision.sequence_kl, rel=METRIC_TOLERANCE, abs=KL_TOLERANCE
        ):
            problems.append(f"{name}: the trajectory of {tokens} action tokens has {seen}, not {decision}")
    divergence = max(abs(found.decisions[t].sequence_kl / d.sequence_kl - 1) for t, d in wanted.decisions.items())
    assert found.gradients.keys() == wanted.gradients.keys()
    assert found.weights.keys() == wanted.weights.keys()
    largest = max(float(g.abs().max()) for g in wanted.gradients.values())
    # Some tensors' gradients are 0 but for rounding (the bias of the keys shifts all scores alike).
    gradients = {
        k: _error(found.gradients[k], g, max(float(g.abs().max()), 1e-3 * largest)) for k, g in wanted.gradients.items()
    }
    weights = {k: _error(found.weights[k], w, OPTIMIZER["lr"]) for k, w in wanted.weights.items()}
    print(
        f"{name}: metrics {worst_metric:.1e}, sequence KL {divergence:.1e}, gradients {max(gradients.values()):.1e}, "
        f"weights {max(weights.values()):.1e}"
    )
    for what, errors, limit in (("gradient", gradients, GRADIENT_TOLERANCE), ("weight", weights, WEIGHT_TOLERANCE)):
        wrong = {k: e for k, e in errors.items() if not e <= limit}
        if wrong:
            worst = max(wrong, key=wrong.__getitem__)
            problems.append(f"{name}: {len(wrong)} {what}s, {worst} by {wrong[worst]:.2g}")
    return problems


def _error(found: torch.Tensor, wanted: torch.Tensor, scale: float) -> float:
    return float((found.double() - wanted.double()).abs().max()) / scale
