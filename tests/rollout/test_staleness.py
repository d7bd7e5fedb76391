import random

from megatron_fr.rollout.staleness import StalenessGate


def test_synchronous_training_admits_exactly_one_batch_at_a_time() -> None:
    gate = StalenessGate(batch_size=4, max_policy_lag=0)
    for batch in range(3):
        for _ in range(4):
            assert gate.may_start()
            gate.started += 1
        assert not gate.may_start(), batch
        gate.consumed_batches += 1


def test_a_lag_of_two_admits_three_batches_ahead_of_the_trainer() -> None:
    gate = StalenessGate(batch_size=4, max_policy_lag=2)
    gate.started += 12
    assert not gate.may_start()
    gate.consumed_batches += 1
    assert gate.may_start(4)
    assert not gate.may_start(5)


def test_failures_and_drops_give_their_place_back() -> None:
    gate = StalenessGate(batch_size=2, max_policy_lag=0)
    gate.started += 2
    gate.failed += 1
    assert gate.may_start(1)
    gate.started += 1
    gate.drop(2)
    assert (gate.live, gate.limit) == (0, 2)
    assert gate.may_start(2)


def test_a_group_starts_whole_or_not_at_all() -> None:
    gate = StalenessGate(batch_size=6, max_policy_lag=0)
    gate.started += 4
    assert not gate.may_start(3)
    assert gate.may_start(2)


def test_no_order_of_events_lets_more_rollouts_in_than_the_bound() -> None:
    rng = random.Random(0)
    for _ in range(200):
        batch, lag = rng.randint(1, 5), rng.randint(0, 3)
        gate = StalenessGate(batch, lag)
        waiting = 0
        for _ in range(100):
            event = rng.choice(["start", "start", "fail", "drop", "commit"])
            if event == "start" and gate.may_start():
                gate.started += 1
                waiting += 1
            elif event == "fail" and waiting:
                gate.failed += 1
                waiting -= 1
            elif event == "drop" and waiting:
                gate.drop(1)
                waiting -= 1
            elif event == "commit" and waiting >= batch:
                gate.consumed_batches += 1
                waiting -= batch
            # What exists beyond the consumed batches is never more than lag + 1 batches.
            assert waiting <= (lag + 1) * batch
            assert gate.live == waiting + gate.consumed_batches * batch
