"""The failure-token filter: which tokens of failures keep their loss."""

import math
from fractions import Fraction

import pytest
import torch

from megatron_fr.algorithm.failure_filter import failure_token_mask

NAN = float("nan")


def test_failures_keep_their_highest_entropy_tokens_and_successes_everything():
    entropy = torch.tensor([[NAN, 0.1, 0.9, 0.5, NAN, 0.7], [NAN, 0.1, 0.9, 0.5, NAN, 0.7]])
    mask = torch.tensor([[False, True, True, True, False, True]] * 2)
    kept = failure_token_mask(entropy, mask, torch.tensor([True, False]), 0.5)
    assert kept[0].nonzero().flatten().tolist() == [2, 5]
    assert torch.equal(kept[1], mask[1])


def test_what_did_not_fail_keeps_everything():
    mask = torch.ones(1, 4, dtype=torch.bool)
    assert failure_token_mask(torch.rand(1, 4), mask, torch.zeros(1, dtype=torch.bool), 0.25).all()


@pytest.mark.parametrize("quantile", [0.1, 0.3, 0.55, 0.7, 0.9, 1.0, 1e-3, 1e-12])
def test_the_count_is_the_exact_ceiling_not_that_of_the_binary_product(quantile):
    lengths = torch.arange(0, 301)
    mask = torch.arange(300)[None, :] < lengths[:, None]
    kept = failure_token_mask(torch.rand(301, 300), mask, torch.ones(301, dtype=torch.bool), quantile)
    expected = [math.ceil(Fraction(str(quantile)) * n) for n in lengths.tolist()]
    assert kept.sum(dim=1).tolist() == expected
    assert not (kept & ~mask).any()


def test_ties_go_to_the_earlier_token():
    mask = torch.ones(1, 100, dtype=torch.bool)
    mask[0, ::7] = False
    kept = failure_token_mask(torch.full((1, 100), 0.3), mask, torch.ones(1, dtype=torch.bool), 0.4)
    actions = mask[0].nonzero().flatten()
    assert torch.equal(kept[0].nonzero().flatten(), actions[: kept.sum()])


def test_bad_input_is_refused():
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="quantile is 0"):
        failure_token_mask(torch.ones(1, 2), mask, torch.ones(1, dtype=torch.bool), 0)
    with pytest.raises(ValueError, match="must be"):
        failure_token_mask(torch.ones(1, 3), mask, torch.ones(1, dtype=torch.bool), 0.5)
    with pytest.raises(ValueError, match="NaN on an action token"):
        failure_token_mask(torch.tensor([[NAN, 1.0]]), mask, torch.ones(1, dtype=torch.bool), 0.5)
