from __future__ import annotations

import logging

import numpy as np
import pytest

from megatron_fr.errors import RolloutEnded, TrajectoryError
from megatron_fr.rollout.queue import LeasedBatch, TrajectoryQueue
from megatron_fr.trajectory import ModelLimits
from tests.support.samples import trajectory

LIMITS = ModelLimits(vocab_size=100, max_context=8, num_moe_layers=2, top_k=2, num_experts=4)


class Drops:
    def __init__(self) -> None:
        self.total = 0

    def __call__(self, count: int) -> None:
        self.total += count


def make(batch_size: int, group_size: int = 1, lag: int = 1) -> tuple[TrajectoryQueue, Drops]:
    drops = Drops()
    queue = TrajectoryQueue(
        batch_size=batch_size, group_size=group_size, max_policy_lag=lag, limits=LIMITS, on_drop=drops
    )
    return queue, drops


def ids(batch: LeasedBatch | None) -> list[str]:
    assert batch is not None
    return [t.id for t in batch.trajectories]


def test_batches_come_in_the_order_of_arrival_and_only_when_full() -> None:
    queue, _ = make(2)
    queue.put(trajectory("b"))
    assert queue.lease(0) is None
    queue.put(trajectory("a"))
    queue.put(trajectory("c"))
    batch = queue.lease(0)
    assert ids(batch) == ["b", "a"]
    assert queue.queued == 1


def test_a_lease_that_was_never_committed_is_handed_out_again() -> None:
    queue, _ = make(2)
    for name in "abcd":
        queue.put(trajectory(name))
    first = queue.lease(0)
    again = queue.lease(0)
    assert (ids(again), again.batch_id) == (ids(first), first.batch_id)
    assert queue.commit(first.batch_id)
    second = queue.lease(0)
    assert ids(second) == ["c", "d"]
    assert second.batch_id != first.batch_id


def test_a_commit_is_idempotent_but_a_foreign_one_is_refused() -> None:
    queue, _ = make(1)
    queue.put(trajectory("a"))
    batch = queue.lease(0)
    with pytest.raises(RolloutEnded, match=r"commit of 'nonsense', but the leased batch is batch-000000"):
        queue.commit("nonsense")
    assert queue.commit(batch.batch_id) is True
    assert queue.commit(batch.batch_id) is False
    assert queue.lease(0) is None


def test_payloads_come_in_the_order_asked_and_only_from_the_lease() -> None:
    queue, _ = make(2)
    for name in "abc":
        queue.put(trajectory(name))
    queue.lease(0)
    assert [t.id for t in queue.fetch(["b", "a"])] == ["b", "a"]
    with pytest.raises(TrajectoryError, match="trajectories c are not in the leased batch"):
        queue.fetch(["a", "c"])


def test_what_is_too_old_when_leasing_is_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    queue, drops = make(2, lag=1)
    queue.put(trajectory("old", version=0))
    queue.put(trajectory("fine", version=1))
    queue.put(trajectory("new", version=2))
    with caplog.at_level(logging.WARNING):
        batch = queue.lease(2)
    assert ids(batch) == ["fine", "new"]
    assert batch.lags == (1, 0)
    assert drops.total == 1
    assert "dropped old: 2 versions old, rollout.max_policy_lag=1" in caplog.text


def test_a_repeated_lease_drops_what_has_become_too_old() -> None:
    queue, drops = make(2, lag=0)
    for name, version in (("a", 0), ("b", 0), ("c", 1), ("d", 1)):
        queue.put(trajectory(name, version=version))
    first = queue.lease(0)
    second = queue.lease(1)
    assert ids(second) == ["c", "d"]
    assert (second.batch_id != first.batch_id, drops.total) == (True, 2)


def test_groups_enter_a_batch_complete_in_the_order_of_their_completion() -> None:
    queue, _ = make(4, group_size=2)
    for name, group in (("a0", "a"), ("b0", "b"), ("c0", "c"), ("c1", "c")):
        queue.put(trajectory(name, group=group))
    assert queue.lease(0) is None
    queue.put(trajectory("b1", group="b"))
    queue.put(trajectory("a1", group="a"))
    batch = queue.lease(0)
    assert ids(batch) == ["c0", "c1", "b0", "b1"]
    assert queue.queued == 2
    again = queue.lease(0)
    assert ids(again) == ids(batch)


def test_a_group_with_one_stale_member_is_dropped_whole() -> None:
    queue, drops = make(2, group_size=2, lag=0)
    queue.put(trajectory("a0", version=0, group="a"))
    queue.put(trajectory("a1", version=1, group="a"))
    queue.put(trajectory("b0", version=1, group="b"))
    queue.put(trajectory("b1", version=1, group="b"))
    assert ids(queue.lease(1)) == ["b0", "b1"]
    assert drops.total == 2


def test_a_discarded_group_frees_its_finished_members() -> None:
    queue, drops = make(3, group_size=3)
    queue.put(trajectory("a0", group="a"))
    queue.put(trajectory("a1", group="a"))
    queue.discard_group("a")
    queue.discard_group("a")
    assert (drops.total, queue.queued) == (2, 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"reward": float("nan")}, "reward is nan"),
        ({"action_mask": np.zeros(4, bool)}, "marks no action token"),
        ({"behavior_logprobs": np.array([0, 0, np.inf, -1], np.float32)}, "non-finite"),
    ],
)
def test_what_breaks_the_contract_is_refused_with_its_id(change: dict, reason: str) -> None:
    queue, _ = make(1)
    with pytest.raises(TrajectoryError, match=f"trajectory 'bad'.*{reason}"):
        queue.put(trajectory("bad", **change))
    assert queue.queued == 0


def test_unusable_routes_are_taken_off_and_the_trajectory_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    queue, _ = make(3)
    good = np.tile(np.array([0, 1], np.uint8), (3, 2, 1))
    queue.put(trajectory("good", routed_experts=good.copy()))
    queue.put(trajectory("short", routed_experts=good[:2].copy()))
    queue.put(trajectory("none", route_error="the engine returned no routes"))
    with_routes, without, none = queue.lease(0).trajectories
    np.testing.assert_array_equal(with_routes.routed_experts, good)
    assert without.routed_experts is None
    assert without.route_error == "has shape (2, 2, 2), expected (3, 2, 2)"
    for dropped in (without, none):
        assert f"trajectory {dropped.id}: routes dropped: {dropped.route_error}" in caplog.text
    assert "trajectory good" not in caplog.text
