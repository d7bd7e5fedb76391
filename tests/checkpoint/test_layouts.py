"""Saved in one layout, loaded in another: weights and Adam's moments, bit by bit. And disks that are full."""

from __future__ import annotations

import hashlib
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_fr.checkpoint.store import (
    all_checkpoints,
    problem,
    read_record,
    remove_unfinished,
    work_folder,
)
from megatron_fr.errors import CheckpointError
from megatron_fr.tiny import make_untrained
from tests.support.layout_ranks import (
    Job,
    failing_writes,
    go_on,
    pass_on,
    pass_on_and_save_run,
    save_on_small_disk,
    whole_tensors,
)
from tests.support.parallel_launch import run_ranks
from tests.support.silly_rename import silly_rename
from tests.support.small_disk import SmallDisk

ROOT = Path(__file__).resolve().parents[2]

VOCAB = 515  # odd: TP 2 has a padding row, TP 1 has none


@pytest.mark.slow
def test_weights_and_moments_survive_every_change_of_layout_bit_by_bit(tmp_path: Path) -> None:
    model = str(make_untrained(tmp_path / "moe", family="qwen3_moe", vocab_size=VOCAB))
    deep = str(make_untrained(tmp_path / "deep", family="qwen3_moe", vocab_size=VOCAB, num_layers=4))
    chains = (
        ("tp", "tp_again", "ep", "ep_again", "pp", "one"),
        ("half_dp", "half_tp", "half_one"),
        ("vpp", "vpp_tp", "vpp_back", "vpp_one"),
    )
    order = [str(tmp_path / name) for chain in chains for name in chain]
    tp, tp_again, ep, ep_again, pp, one, half_dp, half_tp, half_one, vpp, vpp_tp, vpp_back, vpp_one = order
    interleaved = {"world_size": 2, "pp": 2, "vpp": 2}
    two: list[Job] = [
        (model, {"world_size": 2, "tp": 2}, "float32", None, tp),
        (model, {"world_size": 2, "tp": 2}, "float32", tp, tp_again),
        (model, {"world_size": 2, "ep": 2}, "float32", tp, ep_again),
        (model, {"world_size": 2, "ep": 2}, "float32", tp, ep),  # dense layers: distributed optimizer over DP 2
        (model, {"world_size": 2, "pp": 2}, "float32", ep, pp),
        (model, {"world_size": 2}, "bfloat16", None, half_dp),
        (model, {"world_size": 2, "tp": 2}, "bfloat16", half_dp, half_tp),
        (deep, interleaved, "float32", None, vpp),
        (deep, {"world_size": 2, "tp": 2}, "float32", vpp, vpp_tp),
        (deep, interleaved, "float32", vpp_tp, vpp_back),
    ]
    single: list[Job] = [
        (model, {"distributed_optimizer": False}, "float32", pp, one),
        (model, {"distributed_optimizer": False}, "bfloat16", half_tp, half_one),
        (deep, {"distributed_optimizer": False}, "float32", vpp_back, vpp_one),
    ]
    run = tmp_path / "run"
    ranks = run_ranks(pass_on_and_save_run, 2, jobs=two, model=model, output=str(run))
    (alone,) = run_ranks(pass_on, 1, jobs=single)
    jobs = [save for *_, save in (*two, *single)]
    found, others = (dict(zip(jobs, [*answers, *alone], strict=True)) for answers, *_ in ranks)
    tensors = dict(zip(order, run_ranks(whole_tensors, 1, folders=order)[0], strict=True))
    for first, *later in ([str(tmp_path / name) for name in chain] for chain in chains):
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
            assert found[other]["extra"] | {"layout": None} == found[first]["extra"] | {"layout": None}
            assert found[other]["extra"]["adam_step"] == 2
            assert found[other]["lr"] == found[first]["lr"] > 0

    # Random states: in the same layout each rank goes on with its own; in another one all go on from what one says.
    for answers in (found, others):
        assert answers[tp_again]["draws"] == answers[tp]["draws"]
        assert len(answers[tp]["draws"]) > 4
        assert not set(answers[ep]["draws"]) & set(answers[tp]["draws"])
        assert answers[ep]["draws"] == answers[ep_again]["draws"]
    assert found[tp]["draws"][:2] != others[tp]["draws"][:2]

    check_sums(run, [sums for *_, sums in ranks])
    check_conversion(run, ranks[0][1], Path(model), tmp_path)


def check_sums(run: Path, ranks: list[dict[str, Any]]) -> None:
    """The manifest is right, the training processes read no data for it, and they share the reading when they check.

    Rank 1's files took longer to read than a collective could last, both times.
    """
    (checkpoint,) = all_checkpoints(run)
    files = {str(p.relative_to(checkpoint)): p for p in checkpoint.rglob("*") if p.is_file()}
    manifest = json.loads(files.pop("manifest.json").read_text())["files"]
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "rollout.state", "run.json", "hf/config.json"} <= files.keys()
    assert manifest == {
        name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for name, path in files.items()
    }
    for rank in ranks:
        assert not [name for name in rank["saving"] if name.endswith(".distcp") or name == "rollout.state"]
        assert rank["whole"] is None
        assert rank["changed"] == "__0_0.distcp has another checksum than manifest.json says"
    assert "run.json" in ranks[0]["saving"]
    # run.json is also looked at beforehand, with the sizes.
    read = [name for rank in ranks for name in rank["checking"]]
    assert sorted([*read]) == sorted([*(path.name for path in files.values()), "run.json"])
    assert all([name for name in rank["checking"] if name.endswith(".distcp")] for rank in ranks)


def check_conversion(run: Path, weights: dict[str, torch.Tensor], model: Path, tmp_path: Path) -> None:
    """A training checkpoint of TP 2 with optimizer state becomes a complete model folder with nothing else given."""
    from transformers import AutoModelForCausalLM

    model.rename(tmp_path / "elsewhere")  # so that nothing can be taken from there
    (checkpoint,) = all_checkpoints(run)
    assert problem(checkpoint) is None
    out, other = tmp_path / "hf", tmp_path / "hf-other"
    convert(checkpoint, out, "--verify")
    converted = load_file(out / "model.safetensors")
    assert converted.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(converted[name], tensor), name
    source = {f.name: f.read_bytes() for f in (tmp_path / "elsewhere").iterdir() if f.suffix != ".safetensors"}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= source.keys()
    assert {f.name: f.read_bytes() for f in out.iterdir() if f.suffix != ".safetensors"} == source
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    assert torch.equal(loaded.lm_head.weight, weights["lm_head.weight"])

    override = tmp_path / "elsewhere"
    (override / "generation_config.json").write_text('{"temperature": 0.5}')
    convert(checkpoint, other, "--hf-dir", str(override))
    assert (other / "generation_config.json").read_text() == '{"temperature": 0.5}'
    (checkpoint / "hf" / "config.json").write_text("{}")
    assert problem(checkpoint) == "hf/config.json has 2 bytes, expected " + str(len(source["config.json"]))


def convert(checkpoint: Path, out: Path, *options: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["convert_megatron_to_hf.py", str(checkpoint), str(out), *options])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "tools" / "convert_megatron_to_hf.py"), run_name="__main__")
    assert ended.value.code == 0


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
    # Of a series the newest and the two best stay (the newer of equals among them). Update 11 could not be deleted,
    # which is no failure of the checkpoints that were written after it.
    scored = tmp_path / "run" / "scored"
    kept = [folder.name for folder in all_checkpoints(scored)]
    assert kept == ["update-000017", "update-000016", "update-000012", "update-000011"]
    assert [read_record(folder).score for folder in all_checkpoints(scored)] == [0.2, 0.9, 0.9, 0.1]


def test_a_file_system_that_is_really_full_is_one_error_and_the_next_save_goes_on(
    tmp_path: Path, small_disk: SmallDisk
) -> None:
    model = str(make_untrained(tmp_path / "moe", family="qwen3_moe"))
    (error,) = run_ranks(save_on_small_disk, 1, model=model, disk=small_disk)
    assert "training_state/update-000002 could not be written" in error
    assert "No space left on device" in error
    assert "Earlier checkpoints are untouched" in error
    output = small_disk.folder / "run"
    assert [folder.name for folder in all_checkpoints(output)] == ["update-000003", "update-000001"]
    assert [problem(folder) for folder in all_checkpoints(output)] == [None, None]
    assert len(list((output / "training_state").iterdir())) == 2


def test_going_on_from_an_older_one_or_with_another_model_of_equal_sizes(tmp_path: Path) -> None:
    model = str(make_untrained(tmp_path / "moe", family="qwen3_moe"))
    (errors,) = run_ranks(go_on, 1, model=model, output=str(tmp_path / "run"))
    # Gone on from 1 of 3 with keep_last=2: what it went on from and what it wrote stay, the others have other names.
    assert errors["folders"] == [
        "update-000002",
        "update-000001",
        "update-000002",
        "update-000002.abandoned-1",
        "update-000003.abandoned-1",
    ]
    for name, change in (
        ("rope_parameters", "model.rope_theta: 10000.0 then, 20000.0 now"),
        ("rms_norm_eps", "model.rms_norm_eps: 1e-06 then, 1e-05 now"),
        ("norm_topk_prob", "model.norm_topk_prob: True then, False now"),
        ("tie_word_embeddings", "model.tie_word_embeddings: False then, True now"),
        ("temperature", "rollout.temperature: 1.0 then, 0.7 now"),
    ):
        assert f"is of another run ({change}); undo the change" in errors[name], errors[name]
    assert "is of another run (model.tokenizer.json: '" in errors["tokenizer"]
    assert "' then, None now)" in errors["no tokenizer"]
    assert errors["old"] == "accepted"
    # What a rank that is started by hand goes on from: with a damaged file, by its checksum alone, nothing.
    assert errors["auto"] == str(tmp_path / "run" / "training_state" / "update-000002")
    reason = "update-000001: rollout.state has another checksum than manifest.json says"
    assert f"no training checkpoint can be gone on from ({tmp_path}" in errors["none usable"]
    assert f"{reason}); repair one of them, or start anew with checkpoint.resume=never" in errors["none usable"]
    assert f"{reason.replace(': ', ' cannot be gone on from: ')}; choose another one" in errors["explicit"]
    assert errors["never"] == "None"
    assert errors["by itself"] == errors["none usable"]


HOLD = """
import sys
from pathlib import Path
from megatron_fr.checkpoint.store import work_folder
work, lock = work_folder(Path(sys.argv[1]), 8)
(work / "half").write_text("")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_killed_saves_folder_goes_at_the_next_start_and_a_live_ones_stays(tmp_path: Path) -> None:
    killed = tmp_path / "training_state" / "update-000004.tmp"
    killed.mkdir(parents=True)
    (killed / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "training_state" / "update-000002").mkdir()
    (tmp_path / "training_state" / "notes.tmp").mkdir()
    live = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert live.stdout is not None
    assert live.stdout.readline() == "held\n"
    said: list[str] = []
    remove_unfinished(tmp_path, said.append)
    left = sorted(p.name for p in (tmp_path / "training_state").iterdir())
    assert left == ["notes.tmp", "update-000002", "update-000008.tmp"]
    assert said[0] == f"removed {killed}, an unfinished checkpoint of an earlier run"
    assert "update-000008.tmp is being written by another run" in said[1]
    with pytest.raises(CheckpointError, match="is being written by another run; give each run its own output"):
        work_folder(tmp_path, 8)
    assert (tmp_path / "training_state" / "update-000008.tmp" / "half").exists()

    live.kill()  # as a killed run: its lock goes with it
    live.communicate()
    work, lock = work_folder(tmp_path, 8)
    assert [p.name for p in work.iterdir()] == [".writing"]
    assert lock is not None
    lock.close()
    remove_unfinished(tmp_path, said.append)
    assert not work.exists()


def test_a_left_over_goes_on_nfs_where_an_open_file_stays_when_it_is_deleted(tmp_path: Path) -> None:
    def killed_save() -> Path:
        work = tmp_path / "training_state" / "update-000004.tmp"
        (work / "hf").mkdir(parents=True)
        for name in (".writing", "__0_0.distcp", "hf/config.json"):
            (work / name).write_text("half")
        return work

    said: list[str] = []
    killed = killed_save()
    with silly_rename():
        remove_unfinished(tmp_path, said.append)
        assert said == [f"removed {killed}, an unfinished checkpoint of an earlier run"]
        assert not killed.exists()
    killed_save()
    with silly_rename():
        work, lock = work_folder(tmp_path, 4)
        assert [p.name for p in work.iterdir()] == [".writing"]
    assert lock is not None
    lock.close()


def test_a_checkpoint_of_an_earlier_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    from megatron_fr.checkpoint import io as checkpoint_io

    policy: Any = None  # nothing of it is looked at
    with pytest.raises(CheckpointError, match=r"000001 is of an earlier version .* no 'layout'; convert it with"):
        checkpoint_io.read(tmp_path / "update-000001", policy, {"adam_step": 3, "schedule_step": 3})
