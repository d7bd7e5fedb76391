"""The experts' load-balancing loss: its gradient and its metric in every layout, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests.support.update_case import Case
from tests.support.update_layouts import BALANCE_COEFFICIENT, BALANCED
from tests.support.update_ranks import Answers
from tests.support.update_reference import Reference, Update

#: Of the difference of two float32 gradients from float64, relative to the largest entry of either part.
TOLERANCE = 1e-5


class Balance:
    """The reference's load-balancing loss as a function of the micro-batches."""

    def __init__(self, case: Case) -> None:
        self._reference = Reference(case.folder)
        config = self._reference.model.config
        self._top_k, self._experts, self.layers = (
            config.num_experts_per_tok,
            config.num_experts,
            config.num_hidden_layers,
        )
        self._probabilities = self._reference.router_probabilities(case.trajectories)

    def mean(self, micro_batches: Sequence[Sequence[int]]) -> torch.Tensor:
        """float64, the sum over layers of the mean over micro-batches.

        Args:
            micro_batches: of all DP ranks; the trajectories in each, by number of action tokens.
        """
        parts = [
            self._one(torch.cat([self._probabilities[t][layer] for t in batch]))
            for batch in micro_batches
            if batch
            for layer in range(self.layers)
        ]
        return torch.stack(parts).sum() / len(micro_batches)

    def gradients(self, micro_batches: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        return self._reference.gradients_of(BALANCE_COEFFICIENT * self.mean(micro_batches))

    def _one(self, probabilities: torch.Tensor) -> torch.Tensor:
        """``E sum_e f_e P_e`` of one layer's tokens, float64 ``[T, E]``."""
        best = probabilities.topk(self._top_k + 1, dim=-1)
        # A tie within rounding would let layouts count differently.
        assert float((best.values[:, -2] - best.values[:, -1]).detach().min()) > 1e-6
        counts = torch.bincount(best.indices[:, :-1].reshape(-1), minlength=self._experts).double()
        loss = self._experts * (counts / counts.sum() * probabilities.mean(0)).sum()
        # transformers' own, which computes in float32 and does not divide by top-k.
        theirs = load_balancing_loss_func((probabilities.detach().log(),), self._experts, self._top_k)
        assert float(loss.detach()) == pytest.approx(float(theirs) / self._top_k, rel=1e-5)
        return loss


@pytest.fixture(scope="module")
def balance(cases: dict[str, Case]) -> Balance:
    return Balance(cases["moe"])


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.exhaustive) if n == 4 else n for n in BALANCED])
def test_the_loss_adds_its_gradient_and_nothing_else(
    answers: Answers, one_process: dict[str, Update], balance: Balance, world: int
) -> None:
    off = one_process["moe"]
    problems: list[str] = []
    for (_, parallel, train), ranks in zip(BALANCED[world], answers(world)["balanced"], strict=True):
        name = f"{parallel} {train}"
        micro_batches = _micro_batches(ranks)
        metrics = ranks[0]["metrics"]
        for key, value in off.metrics.items():
            # The norm is of the sum of both gradients.
            if key != "train/grad_norm" and metrics[key] != pytest.approx(value, rel=2e-5, abs=1e-9):
                problems.append(f"{name}: {key} is {metrics[key]}, without the loss {value}")
        mean = float(balance.mean(micro_batches)) / balance.layers
        if metrics["train/moe_aux_loss"] != pytest.approx(mean, rel=1e-5):
            problems.append(f"{name}: train/moe_aux_loss is {metrics['train/moe_aux_loss']}, not {mean}")
        wanted = balance.gradients(micro_batches)
        assert _size(wanted, ".mlp.gate.") > _size(off.gradients, ".mlp.gate.")
        errors = {
            key: float((ranks[0]["gradients"][key].double() - off.gradients[key].double() - g).abs().max())
            / max(float(g.abs().max()), float(off.gradients[key].abs().max()), 1e-3 * _size(wanted))
            for key, g in wanted.items()
        }
        worst = max(errors, key=errors.__getitem__)
        print(f"{name}: {len(micro_batches)} micro-batches, aux {mean:.6f}, {worst} by {errors[worst]:.1e}")
        if not errors[worst] <= TOLERANCE:
            wrong = sum(not error <= TOLERANCE for error in errors.values())
            problems.append(f"{name}: {wrong} gradients, {worst} by {errors[worst]:.2g}")
    assert not problems, "\n".join(problems)


def _size(tensors: dict[str, torch.Tensor], part: str = "") -> float:
    """The largest entry of those whose names have ``part``."""
    return max(float(t.abs().max()) for name, t in tensors.items() if part in name)


def _micro_batches(ranks: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Of all DP ranks, as the last pipeline stage saw them."""
    by_rank = {a["data_rank"]: [sorted(rows) for rows in a["decisions"]] for a in ranks if a["decisions"]}
    found = [batch for batches in by_rank.values() for batch in batches]
    assert len(found) == len(by_rank) * ranks[0]["micro_batches"]
    return found
