"""Advantages against hand-computed values and plain Python."""

import statistics

import pytest
import torch

from megatron_fr.algorithm import RewardBatch, batch_mean_advantages, compute_advantages, has_signal
from megatron_fr.algorithm.advantage import GROUP_STD_EPS


def advantages_of(name, rewards, group_ids=None):
    return compute_advantages(name, RewardBatch(rewards, group_ids))


REWARDS = torch.tensor([1.0, 0.0, 0.25, 0.75, 0.0, 1.0], dtype=torch.float64)


def test_two_successes_in_five_get_plus_0_6_and_the_failures_minus_0_4():
    advantages = batch_mean_advantages(torch.tensor([1.0, 0, 0, 1.0, 0], dtype=torch.float64))
    assert advantages.tolist() == pytest.approx([0.6, -0.4, -0.4, 0.6, -0.4], abs=1e-15)


def test_batch_mean_does_not_divide_by_the_standard_deviation():
    assert torch.allclose(advantages_of("batch_mean", REWARDS * 10), advantages_of("batch_mean", REWARDS) * 10)


def test_leave_one_out_compares_with_the_mean_of_the_others():
    values = REWARDS.tolist()
    expected = [r - statistics.mean(values[:i] + values[i + 1 :]) for i, r in enumerate(values)]
    assert advantages_of("leave_one_out", REWARDS).tolist() == pytest.approx(expected, abs=1e-14)


def test_groups_are_normalised_by_their_own_mean_and_sample_deviation_in_any_order():
    groups = ["a", "b", "a", "b", "a", "b"]
    got = advantages_of("group", REWARDS, groups).tolist()
    for name in "ab":
        rows = [i for i, g in enumerate(groups) if g == name]
        members = [REWARDS[i].item() for i in rows]
        deviation = statistics.stdev(members) + GROUP_STD_EPS
        expected = [(r - statistics.mean(members)) / deviation for r in members]
        assert [got[i] for i in rows] == pytest.approx(expected, abs=1e-12)


def test_an_all_equal_group_gets_zero_and_no_nan():
    got = advantages_of("group", torch.tensor([1.0, 1, 0, 1]), [0, 0, 1, 1])
    assert got[:2].tolist() == [0, 0]
    assert got.isfinite().all()


def test_positive_only_zeroes_the_failures_and_none_is_the_raw_reward():
    mean = REWARDS.mean().item()
    expected = [max(r - mean, 0) for r in REWARDS.tolist()]
    assert advantages_of("positive_only", REWARDS).tolist() == pytest.approx(expected)
    assert torch.equal(advantages_of("none", REWARDS), REWARDS)


def test_float32_rewards_are_averaged_in_float64():
    rewards = torch.tensor([1e8, 1.0, -1e8], dtype=torch.float32)
    got = advantages_of("batch_mean", rewards)
    assert got.dtype == torch.float32
    assert got[1].item() == pytest.approx(2 / 3, rel=1e-6)


def test_equal_rewards_carry_no_signal_and_groups_are_judged_one_by_one():
    assert not has_signal(torch.full((7,), 0.1))
    assert has_signal(torch.tensor([0.1, 0.1, 0.2]))
    different_groups = torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert has_signal(different_groups)
    assert not has_signal(different_groups, ["a", "a", "b", "b"])
    assert has_signal(different_groups, ["a", "b", "a", "b"])


def test_what_makes_no_sense_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="unknown; choose one of batch_mean, group"):
        advantages_of("mean", REWARDS)
    with pytest.raises(ValueError, match="reward 1 is nan"):
        advantages_of("batch_mean", torch.tensor([1.0, float("nan")]))
    with pytest.raises(ValueError, match="expected \\[B\\]"):
        advantages_of("batch_mean", torch.zeros(0))
    with pytest.raises(TypeError, match="int64"):
        advantages_of("batch_mean", torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="needs group_ids"):
        advantages_of("group", REWARDS)
    with pytest.raises(ValueError, match="2 group_ids for 6 rewards"):
        advantages_of("group", REWARDS, ["a", "b"])
    with pytest.raises(ValueError, match="'c' has one trajectory"):
        advantages_of("group", REWARDS, ["a", "a", "b", "b", "b", "c"])
    with pytest.raises(ValueError, match="batch of 1"):
        advantages_of("leave_one_out", torch.ones(1))


def test_a_function_of_ones_own_sees_the_whole_batch_and_its_answer_is_checked():
    batch = RewardBatch(
        rewards=REWARDS,
        group_ids=list("aabbcc"),
        action_tokens=torch.tensor([1, 2, 3, 4, 5, 6]),
        lags=torch.tensor([0, 1, 0, 1, 0, 1]),
        metadata=[{"hard": i % 2} for i in range(6)],
    )

    def own(seen):
        assert seen is batch
        weight = torch.tensor([1 + m["hard"] for m in seen.metadata])
        return weight * seen.rewards / seen.action_tokens + seen.lags

    expected = [(1 + i % 2) * r / (i + 1) + i % 2 for i, r in enumerate(REWARDS.tolist())]
    assert compute_advantages(own, batch).tolist() == pytest.approx(expected)
    for wrong in (REWARDS[:2], REWARDS / 0):
        with pytest.raises(ValueError, match="must return 6 finite numbers"):
            compute_advantages(lambda seen, wrong=wrong: wrong, batch)
