"""What a loss of one's own is given, also under context parallelism, and what it may not return."""

from typing import Any

import pytest
import torch

from megatron_fr.algorithm import LossInput, own_loss

MASK = torch.tensor([[True, False, True, True], [False, True, False, False], [False] * 4])
PI = torch.tensor([[-1.0, float("nan"), -2.0, -0.5], [9.0, -1.0, 0.0, 0.0], [0.0] * 4])
MU = torch.tensor([[-1.5, float("inf"), -2.0, -1.0], [0.0, -3.0, 5.0, 0.0], [0.0] * 4])


def call(function: Any, pi: torch.Tensor = PI, columns: slice = slice(None), **changes: Any) -> Any:
    given = {
        "logprobs": pi.clone().requires_grad_()[:, columns],
        "behavior_logprobs": MU[:, columns],
        "entropy": torch.ones_like(MU)[:, columns],
        "action_mask": MASK[:, columns],
        "versions": torch.zeros(3, 4, dtype=torch.int32)[:, columns],
        "advantages": torch.tensor([1.0, -1.0, 0.0]),
        "batch_size": 2,
        "batch_action_tokens": 4,
    }
    return own_loss(function, {}, **{**given, **changes})


def plain(batch: LossInput, **_: Any) -> Any:
    return -(batch.advantages[:, None] * batch.logprobs).sum() / batch.batch_size, {}


def test_masked_slots_hold_nothing_and_lengths_are_the_trajectories_own() -> None:
    seen: list[LossInput] = []

    def keep(batch: LossInput) -> Any:
        seen.append(batch)
        return plain(batch)

    call(keep)
    (batch,) = seen
    for values in (batch.logprobs, batch.behavior_logprobs, batch.entropy):
        assert not values[~MASK].any()
    assert batch.lengths.tolist() == [3, 1, 0]
    assert batch.sequence_kl[2] == 0 < batch.sequence_kl[0]
    assert torch.equal(batch.sum_over_context(batch.lengths), batch.lengths)


def test_what_was_admitted_is_counted_by_trajectory_or_by_token() -> None:
    def some(admitted: torch.Tensor) -> Any:
        return lambda batch: (plain(batch)[0], {"admitted": admitted, "named": 0.25})

    _, stats, named = call(some(torch.tensor([True, False, True])))
    assert (stats.admitted.tolist(), stats.admitted_tokens.tolist()) == ([True, False, True], [3, 0, 0])
    assert stats.ratio_max[0] == pytest.approx(1.6487, abs=1e-4)
    assert {name: float(value) for name, value in named.items()} == {"named": 0.25}
    _, stats, _ = call(some(torch.tensor([[True, True, False, False]]).expand(3, 4)))
    assert (stats.admitted.tolist(), stats.admitted_tokens.tolist()) == ([True, True, True], [1, 1, 0])
    assert call(plain)[1].admitted_tokens.tolist() == [3, 1, 0]


def test_the_parts_of_context_ranks_add_up() -> None:
    loss, stats, _ = call(plain)
    halves = (slice(0, 2), slice(2, 4))
    collected: list[torch.Tensor] = []
    for half in halves:  # first round: what each rank contributes to the sum
        call(plain, columns=half, sum_over_context=lambda values: collected.append(values) or values)
    total = sum(collected[1:], collected[0])
    parts = [call(plain, columns=half, sum_over_context=lambda values: total) for half in halves]
    assert sum(part[0].item() for part in parts) == pytest.approx(loss.item())
    for _, part, _ in parts:
        assert part.trajectory_tokens.tolist() == stats.trajectory_tokens.tolist()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda b: (b.logprobs.sum(1), {}), r"the loss has shape \(3,\), requires_grad=True; return a scalar"),
        (lambda b: (b.logprobs.detach().sum(), {}), "requires_grad=False"),
        (lambda b: (b.logprobs.sum(), {"x": b.advantages}), r"statistic 'x' has shape \(3,\)"),
        (lambda b: (b.logprobs.sum(), {"admitted": b.advantages}), "'admitted' is torch.float32"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(answer: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        call(answer)


def test_a_log_probability_that_is_not_finite_is_found_before_the_function_is_called() -> None:
    broken = PI.clone()
    broken[0, 2] = float("-inf")
    with pytest.raises(FloatingPointError, match=r"row 0 .* non-finite"):
        call(lambda batch: pytest.fail("called"), pi=broken)
