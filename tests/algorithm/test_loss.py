"""FlashREINFORCE's loss against plain Python, all switches, and the faults other stacks had."""

import itertools
import math

import pytest
import torch

from megatron_fr.algorithm.loss import flash_reinforce_loss
from megatron_fr.algorithm.stats import policy_metrics
from tests.support import algorithm_reference as reference

DELTA = 8e-3
NAN, INF = float("nan"), float("inf")


def run(pi, mu, advantages, mask, **options):
    leaf = pi.clone().requires_grad_()
    loss, stats = flash_reinforce_loss(leaf, mu, advantages, mask, **{"delta": DELTA, "batch_size": len(pi), **options})
    loss.backward()
    return loss.detach(), leaf.grad, stats


@pytest.mark.parametrize(
    ("reduction", "admission", "importance"),
    list(itertools.product(["sample_mean", "token_mean"], ["sequence", "token", "off"], ["token", "truncated", "off"])),
)
def test_value_gradient_and_decisions_match_plain_python_for_every_switch(reduction, admission, importance):
    pi, mu, advantages, mask = reference.batch(drift=0.6)
    loss_mask = torch.rand(mask.shape, generator=torch.Generator().manual_seed(3)) < 0.7
    tokens = int(mask.sum()) if reduction == "token_mean" else None
    options = {
        "delta": DELTA, "batch_size": 9, "reduction": reduction, "admission": admission, "importance": importance,
        "truncation": 1.1, "batch_action_tokens": tokens,
    }  # fmt: skip
    lists = [x.tolist() for x in (pi, mu, advantages, mask)]
    expected = reference.flash_loss(*lists, **options, loss_mask=loss_mask.tolist())
    loss, gradient, stats = run(pi, mu, advantages, mask, **options, loss_mask=loss_mask)
    assert loss.item() == pytest.approx(expected[0], rel=1e-10)
    assert torch.allclose(gradient, torch.tensor(expected[1], dtype=torch.float64), rtol=1e-10, atol=1e-14)
    assert stats.sequence_kl.tolist() == pytest.approx(expected[2], rel=1e-7, abs=1e-12)
    assert stats.admitted.tolist() == expected[3]
    if admission == "sequence":
        assert 0 < sum(expected[3]) < len(pi)  # the case exercises both decisions


def test_the_switches_change_the_result():
    pi, mu, advantages, mask = reference.batch(drift=0.6)
    options = [
        {}, {"reduction": "token_mean", "batch_action_tokens": int(mask.sum())}, {"admission": "token"},
        {"admission": "off"}, {"importance": "truncated", "truncation": 1.05}, {"importance": "off"},
    ]  # fmt: skip
    losses = {round(run(pi, mu, advantages, mask, **o)[0].item(), 12) for o in options}
    assert len(losses) == len(options)


def test_gradcheck_with_the_ratio_held_constant():
    # importance off has no stop-gradient, so finite differences see the same function
    pi, mu, advantages, mask = reference.batch()

    def objective(x):
        return flash_reinforce_loss(x, mu, advantages, mask, delta=0, batch_size=6, admission="off", importance="off")[
            0
        ]

    assert torch.autograd.gradcheck(objective, (pi.requires_grad_(),))


def test_two_failures_of_1000_and_4000_tokens_weigh_equally_and_1_to_4_under_the_token_mean():
    mask = torch.zeros(2, 4000, dtype=torch.bool)
    mask[0, :1000] = True
    mask[1, :] = True
    logprobs = torch.full((2, 4000), -0.7, dtype=torch.float64)
    advantages = torch.tensor([-0.4, -0.4], dtype=torch.float64)
    _, gradient, _ = run(logprobs, logprobs, advantages, mask)
    short, long = gradient.sum(dim=1).tolist()
    assert short == pytest.approx(0.2, rel=1e-9)
    assert long == pytest.approx(0.2, rel=1e-9)
    _, gradient, _ = run(logprobs, logprobs, advantages, mask, reduction="token_mean", batch_action_tokens=5000)
    short, long = gradient.sum(dim=1).tolist()
    assert long / short == pytest.approx(4, rel=1e-9)


def test_a_rejected_trajectory_contributes_nothing_yet_counts_in_the_denominator():
    pi, mu, advantages, mask = reference.batch()
    mu[2] = pi[2] - 3.0  # far off policy
    _, gradient, stats = run(pi, mu, advantages, mask)
    assert not stats.admitted[2]
    assert (gradient[2] == 0).all()
    keep = torch.tensor([0, 1, 3, 4, 5])
    _, without, _ = run(pi[keep], mu[keep], advantages[keep], mask[keep], batch_size=6)
    assert torch.equal(gradient[keep], without)


def test_token_admission_and_the_failure_filter_keep_the_trajectory_length():
    pi, mu, advantages, mask = reference.batch()
    mu = pi.clone()
    position = int(mask[1].nonzero()[1])
    mu[1, position] = pi[1, position] - 2
    _, gradient, stats = run(pi, mu, advantages, mask, admission="token")
    assert gradient[1, position] == 0
    assert stats.trajectory_tokens[1] == mask[1].sum()
    assert stats.admitted_tokens[1] == mask[1].sum() - 1
    kept = gradient[1][mask[1] & (gradient[1] != 0)]
    expected = -advantages[1] / (len(pi) * mask[1].sum())
    assert torch.allclose(kept, expected.expand_as(kept), rtol=1e-12)
    loss_mask = mask.clone()
    loss_mask[1, position] = False
    _, filtered, _ = run(pi, pi, advantages, mask, loss_mask=loss_mask)
    assert torch.allclose(filtered, gradient, rtol=1e-12)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masked_slots_poison_neither_value_nor_gradient(poison, dtype):
    pi, mu, advantages, mask = reference.batch(dtype=dtype)
    clean = run(pi, mu, advantages, mask)
    dirty = run(pi.masked_fill(~mask, poison), mu.masked_fill(~mask, -poison), advantages, mask)
    assert torch.equal(dirty[0], clean[0])
    assert torch.equal(dirty[1], clean[1])
    assert torch.equal(dirty[2].sums(), clean[2].sums())
    assert (dirty[1][~mask] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("admission", ["sequence", "token"])
def test_a_row_on_policy_is_admitted_with_delta_0(dtype, admission):
    generator = torch.Generator().manual_seed(5)
    pi = (-torch.rand(4, 5000, generator=generator, dtype=torch.float64) * 4).to(dtype)
    pi[0, :4] = torch.tensor([0.0, -1e-8, -1e3, -200.0], dtype=dtype)
    mask = torch.ones(4, 5000, dtype=torch.bool)
    _, gradient, stats = run(pi, pi.clone(), torch.ones(4, dtype=dtype), mask, delta=0.0, admission=admission)
    assert stats.admitted.all()
    assert (stats.sequence_kl == 0).all()
    assert torch.equal(stats.admitted_tokens, mask.sum(dim=1))
    assert (gradient != 0).all()


def test_float32_divergences_just_off_policy_are_not_negative():
    generator = torch.Generator().manual_seed(6)
    pi = -torch.rand(64, 200, generator=generator)
    mu = pi + torch.randn(64, 200, generator=generator) * 1e-6
    _, _, stats = run(pi, mu, torch.ones(64), torch.ones(64, 200, dtype=torch.bool))
    assert (stats.sequence_kl >= 0).all()
    assert (stats.sequence_kl < 1e-10).all()


def test_rejected_rows_never_reach_exp_and_an_admitted_overflow_raises():
    pi = torch.tensor([[-0.5, -0.5], [-1.0, -1.0]])
    mu = torch.tensor([[-0.5, -0.5], [-200.0, -200.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    advantages = torch.tensor([0.5, -0.5])
    loss, gradient, stats = run(pi, mu, advantages, mask)
    assert stats.admitted.tolist() == [True, False]
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert stats.clamped.sum() == 0
    for options in ({"admission": "off"}, {"delta": 100.0}, {"delta": 100.0, "admission": "token"}):
        with pytest.raises(FloatingPointError, match=r"row 1 .* 2 admitted tokens .* above 88"):
            run(pi, mu, advantages, mask, **options)


def test_the_clamp_is_reported_where_it_bites_without_harm():
    pi = torch.tensor([[-200.0, -0.5], [-1.0, -1.0]])
    mu = torch.tensor([[-0.5, -0.5], [-200.0, -1.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    _, gradient, stats = run(pi, mu, torch.ones(2), mask, admission="off", importance="truncated")
    assert stats.clamped.tolist() == [1, 1]
    assert stats.clipped.tolist() == [0, 1]
    assert gradient[1].tolist() == pytest.approx([-2 / 4, -1 / 4])
    assert gradient.isfinite().all()
    underflow = run(pi[:1], mu[:1], torch.ones(1), mask[:1], admission="off")
    assert underflow[2].clamped.tolist() == [1]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_non_finite_logprob_on_an_action_token_is_an_error_not_a_silent_rejection(bad):
    pi, mu, advantages, mask = reference.batch()
    pi[3, 1] = bad
    with pytest.raises(FloatingPointError, match=r"row 3 .* 1 action tokens"):
        run(pi, mu, advantages, mask)


def test_a_row_without_action_token_is_0_but_stays_in_the_graph():
    pi, mu, advantages, mask = reference.batch()
    mask[4] = False
    loss, gradient, stats = run(pi, mu, advantages, mask)
    assert (gradient[4] == 0).all()
    assert loss.isfinite()
    real = torch.tensor([0, 1, 2, 3, 5])
    assert stats.sums()[:2].tolist() == [5, stats.admitted[real].sum()]
    alone, gradient, _ = run(pi[4:5], mu[4:5], advantages[4:5], mask[4:5], batch_size=6)
    assert alone == 0
    assert gradient.shape == (1, pi.shape[1])
    run(pi[:0], mu[:0], advantages[:0], mask[:0], batch_size=6)
    run(pi[:, :0], mu[:, :0], advantages, mask[:, :0])


@pytest.mark.parametrize("sizes", [[6], [1] * 6, [4, 2], [1, 5]])
@pytest.mark.parametrize("reduction", ["sample_mean", "token_mean"])
def test_micro_batches_of_any_size_add_up_to_the_batch(sizes, reduction):
    pi, mu, advantages, mask = reference.batch(drift=0.6)
    options = {"batch_size": 6, "reduction": reduction}
    if reduction == "token_mean":
        options["batch_action_tokens"] = int(mask.sum())
    loss, gradient, stats = run(pi, mu, advantages, mask, **options)
    parts = [run(*rows, **options) for rows in zip(*(x.split(sizes) for x in (pi, mu, advantages, mask)), strict=True)]
    assert sum(p[0] for p in parts).item() == pytest.approx(loss.item(), rel=1e-12)
    assert torch.equal(torch.cat([p[1] for p in parts]), gradient)
    for name, value in vars(stats).items():
        assert torch.equal(torch.cat([getattr(p[2], name) for p in parts]), value), name
    added = sum(p[2].sums() for p in parts)
    highest = torch.stack([p[2].maxima() for p in parts]).amax(dim=0)
    assert policy_metrics(added, highest) == pytest.approx(policy_metrics(stats.sums(), stats.maxima()), rel=1e-12)


def context_ranks(columns, pi, mu, advantages, mask, **options):
    """Every context rank's result: a first pass records what each contributes, the second one sees the sum."""
    recorded = []

    def rank(own, hook):
        return run(pi[:, own], mu[:, own], advantages, mask[:, own], sum_over_context=hook, **options)

    for own in columns:
        rank(own, lambda x: recorded.append(x) or x)
    assert len(recorded) == len(columns)  # every rank joined exactly one reduction
    return [rank(own, lambda _: torch.stack(recorded).sum(dim=0)) for own in columns]


@pytest.mark.parametrize("options", [{}, {"admission": "token"}, {"importance": "truncated"}])
def test_context_shards_use_whole_trajectory_values_and_add_up(options):
    pi, mu, advantages, mask = reference.batch(drift=0.6, length=12)
    mask[0, 6:] = False  # row 0 leaves some shards without an action token
    columns = [torch.tensor([0, 1, 2, 9, 10, 11]), torch.tensor([3, 4, 5, 6, 7, 8])]  # zig-zag
    loss, gradient, stats = run(pi, mu, advantages, mask, **options)
    ranks = context_ranks(columns, pi, mu, advantages, mask, **options)
    assert sum(r[0] for r in ranks).item() == pytest.approx(loss.item(), rel=1e-12)
    joined = torch.zeros_like(gradient)
    for own, rank in zip(columns, ranks, strict=True):
        joined[:, own] = rank[1]
        assert torch.equal(rank[2].admitted, stats.admitted)
        assert torch.equal(rank[2].trajectory_tokens, stats.trajectory_tokens)
    assert torch.allclose(joined, gradient, rtol=1e-12)
    first, second = ranks[0][2], ranks[1][2]
    assert torch.allclose(first.ratio_sum + second.ratio_sum, stats.ratio_sum)
    assert torch.equal(torch.maximum(first.ratio_max, second.ratio_max), stats.ratio_max)
    assert torch.equal(first.tokens + second.tokens, stats.tokens)
    assert torch.allclose(first.sums() + second.sums(count_rows=False), stats.sums())
    assert torch.allclose(torch.maximum(first.maxima(), second.maxima()), stats.maxima())


def test_the_context_sum_matters_a_shard_alone_would_decide_otherwise():
    pi = torch.full((1, 4), -0.5, dtype=torch.float64)
    mu = pi.clone()
    mu[0, 0] = -2.0  # all drift in the first shard
    mask = torch.ones(1, 4, dtype=torch.bool)
    one = torch.ones(1, dtype=torch.float64)
    whole = run(pi, mu, one, mask, batch_size=1)[2].sequence_kl.item()
    delta = 1.5 * whole
    alone = run(pi[:, :2], mu[:, :2], one, mask[:, :2], batch_size=1, delta=delta)[2]
    assert not alone.admitted.item()
    ranks = context_ranks([torch.tensor([0, 1]), torch.tensor([2, 3])], pi, mu, one, mask, batch_size=1, delta=delta)
    assert all(r[2].admitted.item() for r in ranks)


def test_a_fault_on_one_context_shard_is_raised_on_every_rank_so_none_hangs():
    pi, mu, advantages, mask = reference.batch(length=12)
    pi[2, 1] = NAN
    broken, sound = torch.arange(6), torch.arange(6, 12)
    recorded = []

    def rank(own, hook):
        return run(pi[:, own], mu[:, own], advantages, mask[:, own], sum_over_context=hook)

    with pytest.raises(FloatingPointError, match="row 2"):
        rank(broken, lambda x: recorded.append(x) or x)
    rank(sound, lambda x: recorded.append(x) or x)
    with pytest.raises(FloatingPointError, match="row 2"):
        rank(sound, lambda _: torch.stack(recorded).sum(dim=0))


def test_statistics_are_those_of_the_plain_definitions():
    pi, mu, advantages, mask = reference.batch(drift=0.6)
    _, _, stats = run(pi, mu, advantages, mask)
    metrics = policy_metrics(stats.sums(), stats.maxima())
    actions = [(i, t) for i in range(6) for t in range(pi.shape[1]) if mask[i, t]]
    used = [(i, t) for i, t in actions if stats.admitted[i]]
    ratios = [math.exp(pi[i, t] - mu[i, t]) for i, t in used]
    assert metrics["policy/ratio_mean"] == pytest.approx(sum(ratios) / len(ratios))
    assert metrics["policy/ratio_max"] == pytest.approx(max(ratios))
    assert metrics["policy/train_rollout_logprob_diff"] == pytest.approx(
        sum(abs(float(pi[i, t] - mu[i, t])) for i, t in actions) / len(actions)
    )
    assert metrics["trust_region/admitted"] == pytest.approx(sum(stats.admitted.tolist()) / 6)
    assert metrics["trust_region/admitted_tokens"] == pytest.approx(len(used) / len(actions))
    assert metrics["trust_region/seq_kl_mean"] == pytest.approx(stats.sequence_kl.mean().item())
    assert metrics["trust_region/seq_kl_max"] == stats.sequence_kl.max()
    assert not any(value.requires_grad for value in vars(stats).values())


def test_calls_that_do_not_fit_are_refused():
    pi, mu, advantages, mask = reference.batch()
    for options, error, message in (
        ({"reduction": "token_mean"}, ValueError, "needs the global"),
        ({"batch_action_tokens": 5}, ValueError, "sample_mean takes none"),
        ({"reduction": "mean"}, ValueError, "reduction is 'mean'"),
        ({"admission": "no"}, ValueError, "admission is 'no'"),
        ({"importance": "no"}, ValueError, "importance is 'no'"),
        ({"batch_size": 0}, ValueError, "batch_size is 0"),
        ({"loss_mask": mask[:, :3]}, ValueError, "loss_mask is"),
    ):
        with pytest.raises(error, match=message):
            run(pi, mu, advantages, mask, **options)
    with pytest.raises(ValueError, match="must have one shape"):
        run(pi, mu[:, :4], advantages, mask)
    with pytest.raises(ValueError, match="give bool"):
        run(pi, mu, advantages, mask.int())
    with pytest.raises(ValueError, match="advantages have shape"):
        run(pi, mu, advantages[:2], mask)
    with pytest.raises(TypeError, match="bfloat16; reduce the logits in float32"):
        run(pi.bfloat16(), mu.bfloat16(), advantages, mask)
