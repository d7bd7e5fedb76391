"""Faults of laying trajectories out: rows that belong to another token, and padding that overloads an expert."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_fr.trainer.data.batch import BatchLayout, MicroBatch, RouteShape, build_micro_batch
from megatron_fr.trainer.data.packing import assign_to_ranks, plan_micro_batches
from megatron_fr.trajectory import NO_VERSION, Trajectory

SHAPE = RouteShape(columns=(0, 1, 2), top_k=2, num_experts=8)
LENGTHS = (6, 13, 9)


def make(index: int, length: int) -> Trajectory:
    generator = np.random.default_rng(index)
    mask = generator.random(length) < 0.5
    mask[0], mask[-1] = False, True
    scores = generator.random((length - 1, len(SHAPE.columns), SHAPE.num_experts))
    return Trajectory(
        id=f"t{index}",
        prompt_id=f"p{index}",
        group_id=f"t{index}",
        # A token's number says whose it is and where it stands.
        tokens=(100 * (index + 1) + np.arange(length)).astype(np.int32),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -generator.random(length), 0).astype(np.float32),
        versions=np.where(mask, index, NO_VERSION).astype(np.int32),
        reward=0.0,
        routed_experts=scores.argsort(-1)[..., : SHAPE.top_k].astype(np.uint8),
    )


TRAJECTORIES = [make(i, n) for i, n in enumerate(LENGTHS)]
LAYOUTS = {
    "padded": [BatchLayout()],
    "packed": [BatchLayout(packed=True)],
    "sequence parts": [BatchLayout(sequence_rank=r, sequence_size=2) for r in (0, 1)],
    "context parts": [BatchLayout(packed=True, context_rank=r, context_size=2) for r in (0, 1)],
    "context and sequence parts": [
        BatchLayout(sequence_rank=s, sequence_size=2, context_rank=c, context_size=2) for c in (0, 1) for s in (0, 1)
    ],
}


def build(layout: BatchLayout) -> MicroBatch:
    return build_micro_batch(TRAJECTORIES, [0.5, -0.5, 0.0], layout=layout, route_shape=SHAPE)


def routed_tokens(layout: BatchLayout, batch: MicroBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token numbers, targets and mask in the order in which this rank's routers see them."""

    def order(values: torch.Tensor) -> np.ndarray:
        flat = values.T.reshape(-1).numpy()
        size = len(flat) // layout.sequence_size
        return flat[layout.sequence_rank * size : (layout.sequence_rank + 1) * size]

    return order(batch.tokens), order(batch.targets), order(batch.action_mask)


@pytest.mark.parametrize("name", LAYOUTS)
def test_row_t_processes_token_t_predicts_token_t_plus_1_and_has_the_routes_of_token_t(name: str) -> None:
    seen: set[int] = set()
    for layout in LAYOUTS[name]:
        batch = build(layout)
        assert batch.routes is not None
        rows = zip(*routed_tokens(layout, batch), batch.routes.experts.numpy(), batch.routes.counted, strict=True)
        for token, target, acts, experts, counted in rows:
            assert bool(counted) == (token != 0)
            if not token:
                assert not acts
                continue
            owner, position = TRAJECTORIES[token // 100 - 1], token % 100
            seen.add(int(token))
            assert target == token + 1
            assert acts == owner.action_mask[position + 1]
            np.testing.assert_array_equal(experts, owner.routed_experts[position])
        flat = [t.reshape(-1).tolist() for t in (batch.tokens, batch.behavior_logprobs, batch.versions)]
        for token, behavior, version in zip(*flat, strict=True):
            if token:
                owner, position = TRAJECTORIES[token // 100 - 1], token % 100 + 1
                assert behavior == pytest.approx(float(owner.behavior_logprobs[position]))
                assert version == owner.versions[position]
    # The last token of a trajectory is a target only.
    assert seen == {100 * (i + 1) + p for i, n in enumerate(LENGTHS) for p in range(n - 1)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_padding_rows_have_valid_distinct_experts_and_overload_none(name: str) -> None:
    long = [make(0, 90), make(1, 5), make(2, 5)]
    for layout in LAYOUTS[name]:
        routes = build_micro_batch(long, [0.0] * 3, layout=layout, route_shape=SHAPE).routes
        assert routes is not None
        padding = routes.experts[~routes.counted]
        assert bool(routes.given[~routes.counted].all())
        assert bool(((padding >= 0) & (padding < SHAPE.num_experts)).all())
        assert bool((padding[..., 0] != padding[..., 1]).all())
        if layout.packed:
            continue  # hardly any padding to spread
        for layer in SHAPE.columns:
            counts = torch.bincount(padding[:, layer].reshape(-1), minlength=SHAPE.num_experts)
            assert int(counts.max()) <= 2 * padding.shape[0] * SHAPE.top_k / SHAPE.num_experts


@pytest.mark.parametrize("experts", [8, 300])
def test_a_pipeline_stage_gets_the_routes_of_its_own_layers_in_the_order_of_its_routers(experts: int) -> None:
    made = [
        replace(t, routed_experts=t.routed_experts.astype(np.min_scalar_type(experts)) + experts - 8)
        for t in TRAJECTORIES
        if t.routed_experts is not None
    ]
    whole, stage = (
        build_micro_batch(made, [0.0] * 3, layout=BatchLayout(packed=True), route_shape=RouteShape(columns, 2, experts))
        for columns in ((0, 1, 2), (2, 0))
    )
    whole, stage = whole.routes, stage.routes
    assert whole is not None
    assert stage is not None
    assert stage.experts.element_size() == (1 if experts == 8 else 2)
    assert torch.equal(stage.experts, whole.experts[:, [2, 0]])
    assert int(whole.experts[whole.counted].min()) >= experts - 8


def test_a_trajectory_whose_routes_were_refused_takes_the_live_router() -> None:
    refused = make(1, 13)
    refused.routed_experts = None
    batch = build_micro_batch([TRAJECTORIES[0], refused], [0.0, 0.0], layout=BatchLayout(), route_shape=SHAPE)
    assert batch.routes is not None
    owner = batch.tokens.T.reshape(-1) // 100
    assert torch.equal(batch.routes.given, owner != 2)
    assert torch.equal(batch.routes.counted, owner == 1)


def test_an_empty_micro_batch_has_no_action_token_and_valid_routes() -> None:
    for layout in (layout for layouts in LAYOUTS.values() for layout in layouts):
        batch = build_micro_batch([], [], layout=layout, route_shape=SHAPE)
        assert batch.routes is not None
        assert batch.tokens.shape[1] > 0
        assert not bool(batch.action_mask.any())
        assert bool(batch.routes.given.all())
        assert not bool(batch.routes.counted.any())


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("max_tokens", [None, 64])
def test_no_split_loses_or_repeats_a_trajectory_of_an_uneven_batch(ranks: int, max_tokens: int | None) -> None:
    tokens = [int(n) for n in np.random.default_rng(ranks).integers(2, 100, 7)]
    shares = assign_to_ranks(tokens, ranks)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    loads = [[tokens[i] for i in share] for share in shares]
    plans = [
        plan_micro_batches(loads, rank, micro_batch_size=2, max_tokens=max_tokens, multiple_of=2)
        for rank in range(ranks)
    ]
    assert len({len(plan) for plan in plans}) == 1
    assert len(plans[0]) % 2 == 0
    trained = [share[i] for share, plan in zip(shares, plans, strict=True) for part in plan for i in part]
    assert sorted(trained) == list(range(7))
