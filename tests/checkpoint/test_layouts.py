"""Saved in one layout, loaded in another: weights and Adam's moments, bit by bit. And disks that are full."""

from __future__ import annotations

import json
import math
import runpy
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from megatron_fr.checkpoint.store import (
    all_checkpoints,
    check_sizes,
    read_record,
    remove_unfinished,
)
from megatron_fr.errors import CheckpointError, MegatronFRError
from megatron_fr.runtime.output_lock import lock_output
from tests.support.layout_ranks import (
    Job,
    failing_writes,
    go_on,
    pass_on,
    save_on_small_disk,
    whole_tensors,
)
from tests.support.parallel_launch import run_ranks
from tests.support.small_disk import SmallDisk
from tools.tiny import make_untrained

ROOT = Path(__file__).resolve().parents[2]

VOCAB = 515  # odd: TP 2 has a padding row, TP 1 has none


@pytest.mark.slow
def test_weights_and_moments_survive_every_change_of_layout_bit_by_bit(tmp_path: Path) -> None:
    model = str(make_untrained(tmp_path / "glm", family="glm4_moe", vocab_size=VOCAB, num_layers=4))
    other = str(make_untrained(tmp_path / "moe", family="qwen3_moe", vocab_size=VOCAB))
    chains = (("tp", "ep", "vpp", "one"), ("half", "half_tp", "half_one"))
    order = [str(tmp_path / name) for chain in chains for name in chain]
    tp, ep, vpp, one, half, half_tp, half_one = order
    tp_2, ep_2 = {"world_size": 2, "tp": 2}, {"world_size": 2, "ep": 2}
    # Of four ranks two share each dense parameter's optimizer state, and two each expert's.
    four: list[Job] = [(other, {"world_size": 4, "tp": 2, "ep": 2}, "bfloat16", None, half)]
    two: list[Job] = [
        (model, tp_2, "float32", None, tp),
        (model, tp_2, "float32", tp, None),
        (model, ep_2, "float32", tp, None),
        (model, ep_2, "float32", tp, ep),  # dense layers: distributed optimizer over DP 2
        (model, {"world_size": 2, "pp": 2, "vpp": 2}, "float32", ep, vpp),
        (other, tp_2, "bfloat16", half, half_tp),
    ]
    single: list[Job] = [
        (model, {"distributed_optimizer": False}, "float32", vpp, one),
        (other, {"distributed_optimizer": False}, "bfloat16", half_tp, half_one),
    ]
    run = tmp_path / "run"
    (split, *_) = run_ranks(pass_on, 4, jobs=four)
    first, second = run_ranks(pass_on, 2, jobs=two, run=str(run))
    (alone,) = run_ranks(pass_on, 1, jobs=single)
    jobs = [save for *_, save in (*four, *two, *single)]
    found = dict(zip(jobs, [*split, *first, *alone], strict=True))
    tensors = dict(zip(order, run_ranks(whole_tensors, 1, folders=order)[0], strict=True))
    for start, *later in ([str(tmp_path / name) for name in chain] for chain in chains):
        wanted = tensors[start]
        moments = [value for name, value in wanted.items() if name.startswith("optimizer.state.exp_avg_sq.")]
        assert len(moments) > 20
        assert all(bool(value.any()) for value in moments)
        assert any("fp32_param" in name for name in wanted) == (start == half)
        for later_one in later:
            assert tensors[later_one].keys() == wanted.keys()
            for name, value in wanted.items():
                rows = VOCAB if name.endswith(("word_embeddings.weight", "output_layer.weight")) else None
                assert torch.equal(tensors[later_one][name][:rows], value[:rows]), f"{later_one}: {name}"
            assert found[later_one]["weights"].keys() == found[start]["weights"].keys()
            for name, value in found[start]["weights"].items():
                assert torch.equal(found[later_one]["weights"][name], value), f"{later_one}: {name} after the bridge"
            assert found[later_one]["extra"] | {"layout": None} == found[start]["extra"] | {"layout": None}
            assert found[later_one]["extra"]["adam_step"] == 2
            assert found[later_one]["lr"] == found[start]["lr"] > 0

    # Random states: in the same layout each rank goes on with its own; in another one all go on from what one says.
    for rank in (first, second):
        in_tp, in_tp_again, in_ep, in_ep_again, *_ = (answer["draws"] for answer in rank)
        assert in_tp_again == in_tp
        assert len(in_tp) > 4
        assert not set(in_ep) & set(in_tp)
        assert in_ep_again == in_ep
    assert first[0]["draws"][:2] != second[0]["draws"][:2]

    check_files(run, Path(half))
    check_conversion(run, found[tp]["weights"], Path(model), tmp_path)


@pytest.mark.slow
def test_a_correction_bias_is_saved_in_float32_and_loaded_in_another_layout(tmp_path: Path) -> None:
    folder = make_untrained(tmp_path / "glm", family="glm4_moe", vocab_size=VOCAB)
    model, saved, again = str(folder), str(tmp_path / "tp"), str(tmp_path / "ep")
    jobs: list[Job] = [
        (model, {"world_size": 2, "tp": 2}, "bfloat16", None, saved),
        (model, {"world_size": 2, "ep": 2}, "bfloat16", saved, again),
    ]
    (before, after), _ = run_ranks(pass_on, 2, jobs=jobs)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = load_file(folder / "model.safetensors")[name]
    assert bias.dtype == torch.float32
    assert torch.equal(before["weights"][name], bias)
    assert before["weights"].keys() == after["weights"].keys()
    for key, value in before["weights"].items():
        assert torch.equal(after["weights"][key], value), key
    first, second = run_ranks(whole_tensors, 1, folders=[saved, again])[0]
    assert torch.equal(first["decoder.layers.1.mlp.router.expert_bias"], bias)
    assert first.keys() == second.keys()


def check_files(run: Path, split: Path) -> None:
    """The manifest says each file's size, and each of four ranks wrote its own share.

    In ``run`` rank 1 took longer to write than a collective could last.
    """
    (checkpoint,) = all_checkpoints(run)
    files = {str(p.relative_to(checkpoint)): p.stat().st_size for p in checkpoint.rglob("*") if p.is_file()}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "rollout.state", "run.json", "hf/config.json"} <= files.keys()
    del files["manifest.json"]
    manifest = json.loads((checkpoint / "manifest.json").read_text())["files"]
    assert manifest == {name: {"bytes": size} for name, size in files.items()}

    stored = FileSystemReader(split).read_metadata()
    objects = {key for key, entry in stored.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)}
    assert objects == {f"rng_state/shard_{rank}_4" for rank in range(4)} | {"common_state/shard_0_1"}
    sizes: Counter[str] = Counter()
    for index, place in stored.storage_data.items():
        if index.fqn.startswith("optimizer."):
            sizes[place.relative_path] += place.length
    assert len(sizes) == 4
    assert max(sizes.values()) < 1.5 * min(sizes.values())


def check_conversion(run: Path, weights: dict[str, torch.Tensor], model: Path, tmp_path: Path) -> None:
    """A training checkpoint of TP 2 with optimizer state becomes a complete model folder with nothing else given."""
    from transformers import AutoModelForCausalLM

    model.rename(tmp_path / "elsewhere")  # so that nothing can be taken from there
    (checkpoint,) = all_checkpoints(run)
    check_sizes(checkpoint)
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
    with pytest.raises(CheckpointError, match=f"^hf/config.json has 2 bytes, expected {len(source['config.json'])}$"):
        check_sizes(checkpoint)


def convert(checkpoint: Path, out: Path, *options: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["convert_megatron_to_hf.py", str(checkpoint), str(out), *options])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "tools" / "convert_megatron_to_hf.py"), run_name="__main__")
    assert ended.value.code == 0


@pytest.mark.slow
def test_a_full_disk_is_one_error_and_earlier_and_later_checkpoints_are_whole(tmp_path: Path) -> None:
    model = str(make_untrained(tmp_path / "moe", family="qwen3_moe"))
    (errors,) = run_ranks(failing_writes, 1, model=model, output=str(tmp_path / "run"))
    assert "training_state/update-000002 could not be written" in errors["full"]
    assert "File too large" in errors["full"], errors["full"]
    assert "Earlier checkpoints are untouched" in errors["full"]
    assert "/run/file/in': Not a directory; free space or choose another folder" in errors["unwritable"]
    found = all_checkpoints(tmp_path / "run")
    assert [folder.name for folder in found] == ["update-000003", "update-000001"]
    for folder in found:
        check_sizes(folder)
    assert len(list((tmp_path / "run" / "training_state").iterdir())) == 2  # nothing half-written lies about
    # Of a series the newest and the two best stay (the newer of equals among them). Update 11 could not be deleted,
    # which is no failure of the checkpoints that were written after it.
    scored = tmp_path / "run" / "scored"
    kept = [folder.name for folder in all_checkpoints(scored)]
    assert kept == ["update-000017", "update-000016", "update-000012", "update-000011"]
    assert [read_record(folder).score for folder in all_checkpoints(scored)] == [0.2, 0.9, 0.9, 0.1]


@pytest.mark.slow
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
    for folder in all_checkpoints(output):
        check_sizes(folder)
    assert len(list((output / "training_state").iterdir())) == 2


@pytest.mark.slow
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
        ("rms_norm_eps", "model.norm_eps: 1e-06 then, 1e-05 now"),
        ("norm_topk_prob", "model.moe_router_pre_softmax: False then, True now"),
        ("tie_word_embeddings", "model.tie: False then, True now"),
        ("temperature", "rollout.temperature: 1.0 then, 0.7 now"),
    ):
        assert f"is of another run ({change}); undo the change" in errors[name], errors[name]
    assert "is of another run (model.tokenizer.json: '" in errors["tokenizer"]
    assert "' then, None now)" in errors["no tokenizer"]
    assert errors["old"] == "accepted: 1"
    # Sizes do not show it, but no changed weight or moment is loaded.
    for name in ("changed weight", "changed moment"):
        assert "update-000001 does not hold this model's state: " in errors[name]
    # A second trainer would remove what the first one is writing.
    assert f"output='{tmp_path}/run' is in use by process " in errors["second run"]
    assert errors["auto"] == f"accepted: {tmp_path}/run/training_state/update-000002"
    reason = "update-000001: rollout.state has 3 bytes, expected 5"
    assert f"no training checkpoint can be gone on from ({tmp_path}" in errors["none usable"]
    assert reason in errors["none usable"]
    assert "repair one of them, or start anew with checkpoint.resume=never" in errors["none usable"]
    assert "update-000001 cannot be gone on from: rollout.state has 3 bytes, expected 5" in errors["explicit"]
    assert "; choose another one" in errors["explicit"]
    assert errors["never"] == "accepted: None"


HOLD = """
import sys
from pathlib import Path
from megatron_fr.checkpoint.store import work_folder
from megatron_fr.runtime.output_lock import lock_output
lock = lock_output(Path(sys.argv[1]), "training_state")
(work_folder(Path(sys.argv[1]), 8) / "half").write_text("")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_killed_saves_folder_goes_at_the_next_start_and_a_live_ones_stays(tmp_path: Path) -> None:
    root = tmp_path / "training_state"
    (root / "update-000002").mkdir(parents=True)
    (root / "notes.tmp").mkdir()
    live = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert live.stdout is not None
    assert live.stdout.readline() == "held\n"
    with pytest.raises(MegatronFRError, match=rf"is in use by process {live.pid} on \S+, since .*; wait for its end"):
        lock_output(tmp_path, "training_state")
    assert (root / "update-000008.tmp" / "half").exists()

    live.kill()  # as a killed run: its lock goes with it
    live.communicate()
    lock = lock_output(tmp_path, "training_state")
    assert lock is not None
    said: list[str] = []
    remove_unfinished(tmp_path, said.append)
    lock.close()
    assert sorted(p.name for p in root.iterdir()) == ["notes.tmp", "update-000002"]
    assert said == [f"removed {root / 'update-000008.tmp'}, which an earlier run left behind"]


def test_a_range_of_a_flat_parameter_is_a_few_boxes_in_order() -> None:
    from megatron_fr.checkpoint.state import split_range

    for shape in ((7,), (4, 5), (3, 4, 5)):
        elements = torch.arange(math.prod(shape)).view(shape)
        for start, stop in combinations(range(elements.numel() + 1), 2):
            boxes = list(split_range(shape, start, stop))
            assert len(boxes) < 2 * len(shape)
            found = [
                elements[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))].flatten()
                for offset, size in boxes
            ]
            assert torch.cat(found).tolist() == list(range(start, stop))
