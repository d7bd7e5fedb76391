"""Saved in one layout, loaded in another: weights and Adam's moments, bit by bit. And disks that are full."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from layout_ranks import Job, failing_writes, pass_on, whole_tensors
from parallel_launch import run_ranks

from megatron_fr.checkpoints import all_checkpoints, problem
from megatron_fr.tiny import make_untrained

VOCAB = 515  # odd: TP 2 has a padding row, TP 1 has none


@pytest.mark.slow
def test_weights_and_moments_survive_every_change_of_layout_bit_by_bit(tmp_path: Path) -> None:
    model = str(make_untrained(tmp_path / "moe", family="qwen3_moe", vocab_size=VOCAB))
    names = ("tp", "ep", "pp", "half_dp", "half_tp", "one", "half_one")
    tp, ep, pp, half_dp, half_tp, one, half_one = (str(tmp_path / name) for name in names)
    two: list[Job] = [
        (model, {"world_size": 2, "tensor": 2}, "float32", None, tp),
        (model, {"world_size": 2, "expert": 2}, "float32", tp, ep),  # dense layers: distributed optimizer over DP 2
        (model, {"world_size": 2, "pipeline": 2}, "float32", ep, pp),
        (model, {"world_size": 2}, "bfloat16", None, half_dp),
        (model, {"world_size": 2, "tensor": 2}, "bfloat16", half_dp, half_tp),
    ]
    single: list[Job] = [
        (model, {"distributed_optimizer": False}, "float32", pp, one),
        (model, {"distributed_optimizer": False}, "bfloat16", half_tp, half_one),
    ]
    answers = [*run_ranks(pass_on, 2, jobs=two)[0], *run_ranks(pass_on, 1, jobs=single)[0]]
    order = (tp, ep, pp, half_dp, half_tp, one, half_one)
    found = dict(zip(order, answers, strict=True))
    tensors = dict(zip(order, run_ranks(whole_tensors, 1, folders=list(order))[0], strict=True))
    for first, *later in ((tp, ep, pp, one), (half_dp, half_tp, half_one)):
        wanted = tensors[first]
        moments = [value for name, value in wanted.items() if name.startswith("optimizer.state.exp_avg_sq.")]
        assert len(moments) > 20
        assert all(bool(value.any()) for value in moments)
        assert any("fp32_param" in name for name in wanted) == (first == half_dp)
        for other in later:
            assert tensors[other].keys() == wanted.keys()
            for name, value in wanted.items():
                rows = VOCAB if name.endswith(("word_embeddings.weight", "output_layer.weight")) else None
                assert torch.equal(tensors[other][name][:rows], value[:rows]), f"{other}: {name}"
            assert found[other]["weights"].keys() == found[first]["weights"].keys()
            for name, value in found[first]["weights"].items():
                assert torch.equal(found[other]["weights"][name], value), f"{other}: {name} after the bridge"
            assert found[other]["extra"] | {"world_size": 2} == found[first]["extra"]
            assert found[other]["extra"]["adam_step"] == 2
            assert found[other]["lr"] == found[first]["lr"] > 0


def test_a_full_disk_is_one_error_and_earlier_and_later_checkpoints_are_whole(tmp_path: Path) -> None:
    model = str(make_untrained(tmp_path / "moe", family="qwen3_moe"))
    (errors,) = run_ranks(failing_writes, 1, model=model, output=str(tmp_path / "run"))
    assert "training_state/update-000002 could not be written" in errors["full"]
    assert "File too large" in errors["full"], errors["full"]
    assert "Earlier checkpoints are untouched" in errors["full"]
    assert "could not be written (Not a directory)" in errors["unwritable"]
    found = all_checkpoints(tmp_path / "run")
    assert [folder.name for folder in found] == ["update-000003", "update-000001"]
    assert [problem(folder) for folder in found] == [None, None]
    assert len(list((tmp_path / "run" / "training_state").iterdir())) == 2  # nothing half-written lies about
