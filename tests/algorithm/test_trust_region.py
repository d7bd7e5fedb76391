"""The Bernoulli KL: values, extremes, and float32 pitfalls."""

import itertools
import math

import pytest
import torch

from megatron_fr.algorithm.trust_region import bernoulli_kl, sequence_mean
from tests.support import algorithm_reference as reference

EXTREMES = [0.0, -1e-12, -1e-7, -1e-6, -1e-3, -0.5, -5.0, -20.0, -90.0, -800.0, -1e30, 1e-5]


def test_values_match_the_formula_in_plain_python():
    for p, q in itertools.product([1e-5, 0.01, 0.3, 0.5, 0.9, 0.999], repeat=2):
        got = bernoulli_kl(torch.tensor([math.log(p)]).double(), torch.tensor([math.log(q)]).double())
        assert got.item() == pytest.approx(reference.kl(math.log(p), math.log(q)), rel=1e-6, abs=1e-12)


def test_a_known_value_half_against_quarter():
    got = bernoulli_kl(torch.tensor(0.5, dtype=torch.float64).log(), torch.tensor(0.25, dtype=torch.float64).log())
    assert got.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-12)


def test_probabilities_are_clamped_as_published_so_certain_against_impossible_is_finite():
    got = bernoulli_kl(torch.tensor([0.0]), torch.tensor([-1e30])).item()
    low, high = 1e-6, 1 - 1e-6
    assert got == pytest.approx(high * math.log(high / low) + low * math.log(low / high), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_finite_and_never_negative_for_every_finite_input(dtype):
    p, q = torch.tensor(list(itertools.product(EXTREMES, repeat=2)), dtype=dtype).T
    d = bernoulli_kl(p, q)
    assert d.isfinite().all()
    assert (d >= 0).all()
    assert (d[p == q] == 0).all()
    generator = torch.Generator().manual_seed(1)
    p = -torch.rand(100_000, generator=generator, dtype=dtype) * 3
    d = bernoulli_kl(p, p + torch.randn(100_000, generator=generator, dtype=dtype) * 1e-6)
    assert (d >= 0).all()
    assert d.isfinite().all()


def test_tiny_drift_near_certainty_keeps_its_digits():
    # second order: d is (p - q)^2 / (2 p (1 - p)); naive float32 arithmetic gives noise of either sign here
    p, q = 1 - 1e-3, 1 - 1.001e-3
    got = bernoulli_kl(torch.tensor(math.log(p)).double(), torch.tensor(math.log(q)).double()).item()
    assert got == pytest.approx((p - q) ** 2 / (2 * p * (1 - p)), rel=2e-3)


def test_the_sequence_mean_is_never_negative_and_0_without_tokens():
    got = sequence_mean(torch.tensor([-1e-12, 0.0, 0.3]).double(), torch.tensor([4.0, 0.0, 3.0]).double())
    assert got[:2].tolist() == [0, 0]
    assert got[2].item() == pytest.approx(0.1)
