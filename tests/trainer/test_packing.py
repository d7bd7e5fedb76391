"""Which trajectories share a rank and a forward, and where a context rank's tokens and padding routes are."""

from __future__ import annotations

import torch

from megatron_fr.models.layers.zigzag import zigzag_positions
from megatron_fr.trainer.data.packing import assign_to_ranks, pack_micro_batches, plan_micro_batches
from megatron_fr.trainer.routing_replay import padding_routes


def test_ranks_get_every_trajectory_once_and_balanced_loads() -> None:
    tokens = [900, 10, 20, 30, 500, 400, 40]
    shares = assign_to_ranks(tokens, 2)
    assert sorted(i for share in shares for i in share) == list(range(7))
    assert sorted(len(share) for share in shares) == [3, 4]
    assert abs(sum(tokens[i] for i in shares[0]) - sum(tokens[i] for i in shares[1])) <= 60


def test_packs_stay_below_the_budget_and_an_oversized_trajectory_is_alone() -> None:
    tokens = [100, 30, 40, 25, 5]
    packs = pack_micro_batches(tokens, 70)
    assert sorted(i for pack in packs for i in pack) == list(range(5))
    assert [0] in packs
    assert all(sum(tokens[i] for i in pack) <= 70 for pack in packs if pack != [0])


def test_every_rank_plans_the_same_number_of_micro_batches() -> None:
    shares = [[60, 60, 60], [10]]
    plans = [plan_micro_batches(shares, r, micro_batch_size=1, max_tokens=70, multiple_of=2) for r in (0, 1)]
    assert [len(plan) for plan in plans] == [4, 4]
    assert [i for part in plans[1] for i in part] == [0]


def test_zigzag_parts_cover_a_sequence_once_and_pair_early_with_late_chunks() -> None:
    parts = [zigzag_positions(8, rank, 2) for rank in (0, 1)]
    assert parts[0].tolist() == [0, 1, 6, 7]
    assert parts[1].tolist() == [2, 3, 4, 5]


def test_padding_routes_are_distinct_in_a_row_and_spread_over_experts() -> None:
    routes = padding_routes(64, [0, 1], 3, 8).long()
    assert all(len(set(row.tolist())) == 3 for row in routes.view(-1, 3))
    counts = torch.bincount(routes[:, 0].reshape(-1), minlength=8)
    assert int(counts.max() - counts.min()) <= 1
