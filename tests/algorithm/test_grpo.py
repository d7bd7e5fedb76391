"""GRPO's clipped loss against plain Python."""

import pytest
import torch

from megatron_fr.algorithm.grpo import grpo_loss
from tests.support import algorithm_reference as reference


def run(pi, old, advantages, mask, **options):
    leaf = pi.clone().requires_grad_()
    options = {"clip_low": 0.2, "clip_high": 0.28, "batch_size": len(pi), "old_logprobs": old, **options}
    loss, stats = grpo_loss(leaf, old, advantages, mask, **options)
    loss.backward()
    return loss.detach(), leaf.grad, stats


@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.05, 0.5), (0.9, 10.0)])
@pytest.mark.parametrize("all_tokens", [None, 77], ids=["mean of a response first", "mean of all tokens"])
def test_value_and_gradient_match_plain_python(clip, all_tokens):
    pi, mu, advantages, mask = reference.batch(drift=0.9)
    options = {"clip_low": clip[0], "clip_high": clip[1], "batch_size": 8, "batch_action_tokens": all_tokens}
    loss, gradient, stats = run(pi, mu, advantages, mask, **options)
    expected = reference.grpo_loss(*(x.tolist() for x in (pi, mu, advantages, mask)), **options)
    assert loss.item() == pytest.approx(expected[0], rel=1e-10)
    assert torch.allclose(gradient, torch.tensor(expected[1], dtype=torch.float64), rtol=1e-10, atol=1e-14)
    cut = mask & (gradient == 0)
    assert stats.clipped.sum() == cut.sum()
    if clip[0] == 0.2:
        assert 0 < cut.sum() < mask.sum()


def test_gradcheck_on_smooth_points():
    pi, mu, advantages, mask = reference.batch(drift=0.9)

    def objective(x):
        options = {"clip_low": 0.2, "clip_high": 0.2, "batch_size": 6, "old_logprobs": mu}
        return grpo_loss(x, mu, advantages, mask, **options)[0]

    assert torch.autograd.gradcheck(objective, (pi.requires_grad_(),))


def test_on_policy_the_gradient_is_plain_reinforce():
    pi, _, advantages, mask = reference.batch()
    _, gradient, _ = run(pi, pi.clone(), advantages, mask)
    expected = -(advantages / mask.sum(dim=1) / len(pi))[:, None] * mask
    assert torch.allclose(gradient, expected, rtol=1e-12)


def test_without_old_log_probabilities_the_policy_is_its_own_denominator():
    pi, mu, advantages, mask = reference.batch(drift=0.9)
    expected = run(pi, pi, advantages, mask)
    leaf = pi.clone().requires_grad_()
    loss, stats = grpo_loss(leaf, mu, advantages, mask, clip_low=0.2, clip_high=0.28, batch_size=len(pi))
    loss.backward()
    assert loss.item() == pytest.approx(expected[0].item(), rel=1e-12)
    assert torch.allclose(leaf.grad, expected[1], rtol=1e-12)
    assert stats.clipped.sum() == 0
    assert (stats.sequence_kl > 0).any()  # statistics are of the policy that sampled


def test_micro_batches_add_up_and_masked_slots_do_not_poison():
    pi, mu, advantages, mask = reference.batch(drift=0.6)
    loss, gradient, stats = run(pi, mu, advantages, mask)
    dirty = (pi.masked_fill(~mask, float("nan")), mu.masked_fill(~mask, -float("inf")), advantages, mask)
    parts = [run(*rows, batch_size=6) for rows in zip(*(x.split([1, 3, 2]) for x in dirty), strict=True)]
    assert sum(p[0] for p in parts).item() == pytest.approx(loss.item(), rel=1e-12)
    assert torch.equal(torch.cat([p[1] for p in parts]), gradient)
    for name, value in vars(stats).items():
        assert torch.equal(torch.cat([getattr(p[2], name) for p in parts]), value), name


def test_an_overflow_is_bounded_by_the_clip_for_successes_and_raises_for_failures():
    pi, mu = torch.full((1, 3), -0.5), torch.full((1, 3), -200.0)
    mask = torch.ones(1, 3, dtype=torch.bool)
    loss, gradient, stats = run(pi, mu, torch.tensor([3.0]), mask)
    assert loss.item() == pytest.approx(-3 * 1.28)
    assert (gradient == 0).all()
    assert stats.clamped.tolist() == [3]
    with pytest.raises(FloatingPointError, match="overflows"):
        run(pi, mu, torch.tensor([-3.0]), mask)


def test_context_shards_add_up():
    pi, mu, advantages, mask = reference.batch(drift=0.6, length=12)
    loss, gradient, _ = run(pi, mu, advantages, mask)
    shards = [torch.arange(0, 12, 2), torch.arange(1, 12, 2)]
    recorded = []
    for own in shards:
        run(pi[:, own], mu[:, own], advantages, mask[:, own], sum_over_context=lambda x: recorded.append(x) or x)
    total = torch.stack(recorded).sum(dim=0)
    ranks = [run(pi[:, own], mu[:, own], advantages, mask[:, own], sum_over_context=lambda _: total) for own in shards]
    assert sum(r[0] for r in ranks).item() == pytest.approx(loss.item(), rel=1e-12)
    for own, rank in zip(shards, ranks, strict=True):
        assert torch.allclose(rank[1], gradient[:, own], rtol=1e-12)


def test_wrong_shapes_and_sizes_are_refused():
    pi, mu, advantages, mask = reference.batch()
    with pytest.raises(ValueError, match="advantages have shape"):
        run(pi, mu, advantages[:1], mask)
    with pytest.raises(ValueError, match="batch_size is 0"):
        run(pi, mu, advantages, mask, batch_size=0)
