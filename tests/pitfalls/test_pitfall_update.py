"""Faults of a whole update that users of such systems report, on one rank of the real trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_fr.trajectory import Trajectory, encode
from tests.support.parallel_launch import run_ranks
from tests.support.pitfall_ranks import make_batch, observe_faults, observe_steps, observe_updates
from tools.tiny import make_untrained

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = make_untrained(tmp_path_factory.mktemp("pitfalls") / "moe", family="qwen3_moe")
    (folder / "batch.npz").write_bytes(encode(_with_own_routes(folder)))
    answers: list[dict[str, Any]] = run_ranks(observe_updates, 1, folder=folder, own_routes=folder / "batch.npz")
    return answers[0]


def _with_own_routes(folder: Path) -> list[Trajectory]:
    """Trajectories whose routes are those that transformers' model of the folder chooses."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    config = model.config
    made = make_batch(
        config.vocab_size, config.num_hidden_layers, config.num_experts_per_tok, config.num_experts, behavior=-0.01
    )
    for trajectory in made:
        tokens = torch.from_numpy(trajectory.tokens[None, :-1].astype(np.int64))
        with torch.no_grad():
            logits = model(tokens, output_router_logits=True).router_logits
        chosen = [layer.topk(config.num_experts_per_tok, dim=-1).indices.numpy() for layer in logits]
        trajectory.routed_experts = np.stack(chosen, axis=1).astype(np.uint8)
    return made


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_batch_that_is_rejected_whole_takes_no_step_and_decays_no_weight(seen: dict[str, Any]) -> None:
    assert seen["rejected"]["metrics"]["trust_region/admitted_tokens"] == 0
    assert not seen["rejected"]["stepped"]
    assert _same(seen["before"], seen["rejected"]["weights"])


def test_equal_rewards_carry_no_signal_and_a_skipped_batch_moves_nothing(seen: dict[str, Any]) -> None:
    assert not seen["signal_of_equal_rewards"]
    assert _same(seen["before"], seen["skipped_weights"])


def test_gates_ratios_and_gradients_come_out_of_one_forward_an_update(seen: dict[str, Any]) -> None:
    assert seen["sound"]["micro_batches"] == 3
    assert seen["sound"]["forwards"] == 3


def test_an_update_on_policy_is_admitted_whole_and_moves_every_tensor(seen: dict[str, Any]) -> None:
    sound = seen["sound"]
    assert sound["stepped"]
    assert sound["metrics"]["trust_region/admitted_tokens"] > 0
    assert sound["metrics"]["policy/route_agreement"] < 0.5
    still = [n for n, w in sound["weights"].items() if torch.equal(w, seen["skipped_weights"][n])]
    assert not still


def test_routers_learn_from_routes_that_they_would_not_have_chosen(seen: dict[str, Any]) -> None:
    gradients = seen["sound"]["router_gradients"]
    assert len(gradients) == 2
    assert min(gradients.values()) > 0


def test_replaying_the_routes_that_the_live_router_chooses_changes_nothing(seen: dict[str, Any]) -> None:
    metrics = seen["own_routes"]
    assert metrics["policy/route_agreement"] == 1
    assert metrics["policy/train_rollout_logprob_diff"] > 1
    assert metrics["policy/train_rollout_logprob_diff_without_replay"] == pytest.approx(
        metrics["policy/train_rollout_logprob_diff"], rel=1e-7
    )
    assert metrics["policy/replay_logprob_change"] < 1e-6
    assert "policy/replay_logprob_change" not in seen["sound"]["metrics"]


def test_weight_decay_exempts_norms_and_biases_and_nothing_else(seen: dict[str, Any]) -> None:
    exempt = sum(numel for multiplier, numel in seen["groups"] if multiplier == 0)
    decayed = sum(numel for multiplier, numel in seen["groups"] if multiplier == 1)
    assert exempt == seen["exempt_numel"] > 0
    assert decayed == seen["all_numel"] - exempt


def test_a_value_that_is_not_finite_on_one_rank_ends_the_update_on_all_before_weights_move(tmp_path: Path) -> None:
    folder = make_untrained(tmp_path / "moe", family="qwen3_moe")
    first, second = run_ranks(observe_faults, 2, folder=folder)
    assert first["ratio"]["error"] == second["ratio"]["error"]
    assert "trainer rank 1: row 0" in first["ratio"]["error"]
    assert "importance ratio overflows" in first["ratio"]["error"]
    assert "a gradient is not finite" in first["gradient"]["error"]
    assert first["gradient"]["error"] == second["gradient"]["error"]
    assert "non-finite log-probability" in first["weights"]["error"]
    for answer in (first, second):
        assert answer["ratio"]["unchanged"]
        assert answer["gradient"]["unchanged"]
        assert "its norm is not" in answer["norm"]["error"]
        assert answer["norm"]["unchanged"]
        # The faults leave nothing behind: the next sound batch is an ordinary update.
        assert not answer["sound"]["error"]
        assert not answer["sound"]["unchanged"]


def test_the_clip_of_several_steps_is_against_the_policy_before_the_first(tmp_path: Path) -> None:
    (seen,) = run_ranks(observe_steps, 1, folder=make_untrained(tmp_path / "moe", family="qwen3_moe"))
    assert 0 < seen["metrics"]["policy/clipped"] < 1
    assert seen["metrics"]["policy/ratio_max"] > 1.2
    together, apart = seen["together"], seen["one by one"]
    for name, weight in together.items():
        # The forward of log-probabilities alone rounds otherwise than the training forward.
        torch.testing.assert_close(weight, apart[name], rtol=0, atol=1e-5, msg=name)
