"""What both conversions refuse: one error that names file and tensor, and a target folder that stays as it was."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_fr.checkpoint import store as checkpoints
from megatron_fr.checkpoint.store import RunRecord
from megatron_fr.errors import ModelError
from megatron_fr.hf.checkpoint_files import find_checkpoint
from megatron_fr.hf.to_hf import convert_megatron_to_hf
from megatron_fr.hf.to_megatron import convert_hf_to_megatron
from megatron_fr.tiny import make_untrained

TOOLS = Path(__file__).resolve().parents[2] / "tools"
DOWN = "model.layers.0.mlp.experts.0.down_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model folder and its Megatron checkpoint."""
    root = tmp_path_factory.mktemp("pristine")
    folder = make_untrained(root / "hf")
    return folder, convert_hf_to_megatron(folder, root / "megatron", tensor=2)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def truncate(path: Path, by: int) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def split_and_lose_one(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    save_file({n: t for n, t in tensors.items() if files[n].startswith("model-00001")}, folder / min(files.values()))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "model.safetensors").unlink()


def set_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def set_file(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def set_header(folder: Path, value: object) -> None:
    header = json.dumps(value).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


SUPPORTED = "supported.*: Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM"
INDEX = "model.safetensors.index.json"
SHAPE = {"dtype": "F32", "shape": [2, "2"], "data_offsets": [0, 16]}

HF_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda f: truncate(f / "model.safetensors", 1000), r"model\.safetensors is damaged .*: tensor '.+'"),
    "missing shard": (split_and_lose_one, r"model-00002-of-00002\.safetensors is missing"),
    "wrong shape": (
        lambda f: rewrite(f, lambda t: t.update({DOWN: t[DOWN].T.contiguous()})),
        rf"{DOWN}.*\(80, 96\).*\(96, 80\)|{DOWN}.*\(96, 80\).*\(80, 96\)",
    ),
    "missing tensor": (lambda f: rewrite(f, lambda t: t.__delitem__(DOWN)), DOWN),
    "unknown architecture": (lambda f: set_config(f, architectures=["Qwen9ForCausalLM"]), "Qwen9ForCausalLM"),
    "no configuration": (lambda f: (f / "config.json").unlink(), r"no config\.json"),
    "configuration no object": (
        lambda f: set_file(f / "config.json", []),
        r"config\.json holds list, expected an object",
    ),
    "unknown model type": (lambda f: set_config(f, model_type="qwen9"), rf"model_type 'qwen9' is unknown; {SUPPORTED}"),
    "both unknown": (
        lambda f: set_config(f, model_type="qwen9", architectures=["Qwen9"]),
        rf"config\.json: model architecture \['Qwen9'\] has no mapping; {SUPPORTED}",
    ),
    "size of another type": (lambda f: set_config(f, num_hidden_layers="2"), r"config\.json .*'num_hidden_layers'"),
    "size 0": (lambda f: set_config(f, num_attention_heads=0), r"config\.json: num_attention_heads is 0, expected 1"),
    "index no object": (lambda f: set_file(f / INDEX, []), r"index\.json is damaged"),
    "index of a list": (lambda f: set_file(f / INDEX, {"weight_map": ["a"]}), r"index\.json is damaged: weight_map is"),
    "header no object": (lambda f: set_header(f, 12345678), r"model\.safetensors is damaged .*its header holds int"),
    "header of a list": (lambda f: set_header(f, ["tensor"]), r"model\.safetensors is damaged .*its header holds list"),
    "header without sizes": (lambda f: set_header(f, {"w": SHAPE}), r"model\.safetensors is damaged .*\[2, '2'\]"),
}

MEGATRON_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda f: truncate(f / "__1_0.distcp", 1000), r"__1_0\.distcp is cut off: tensor '.+'"),
    "missing shard": (lambda f: (f / "__1_0.distcp").unlink(), r"__1_0\.distcp is missing"),
    "wrong shape": (
        lambda f: set_config(f / "hf", moe_intermediate_size=64),
        r"tensor 'decoder\..*' has shape .*config\.json implies",
    ),
    "damaged index": (lambda f: truncate(f / ".metadata", 50), r"\.metadata is damaged"),
    "unknown architecture": (lambda f: set_config(f / "hf", architectures=["Qwen9ForCausalLM"]), "Qwen9ForCausalLM"),
    "no configuration": (lambda f: shutil.rmtree(f / "hf"), r"has no hf/config\.json; .*--hf-dir"),
}


def check_refused(call: Callable[[Path], object], match: str, root: Path) -> None:
    """With a target that exists, and with one that does not."""
    kept = root / "kept"
    kept.mkdir()
    (kept / "config.json").write_text("as it was")  # an earlier result, which success would replace
    before = sorted(p.name for p in root.iterdir())
    for target in (kept, root / "new"):
        with pytest.raises(ModelError, match=match) as refused:
            call(target)
        assert "\n" not in str(refused.value)
    assert sorted(p.name for p in root.iterdir()) == before  # no folder half-written, here or beside it
    assert [(p.name, p.read_text()) for p in kept.iterdir()] == [("config.json", "as it was")]


@pytest.mark.parametrize("damage", HF_DAMAGE)
def test_a_damaged_model_folder_is_refused(pristine: tuple[Path, Path], tmp_path: Path, damage: str) -> None:
    source = Path(shutil.copytree(pristine[0], tmp_path / "model"))
    spoil, match = HF_DAMAGE[damage]
    spoil(source)
    check_refused(lambda target: convert_hf_to_megatron(source, target, overwrite=True), match, tmp_path)


@pytest.mark.parametrize("damage", MEGATRON_DAMAGE)
def test_a_damaged_checkpoint_is_refused(pristine: tuple[Path, Path], tmp_path: Path, damage: str) -> None:
    checkpoint = Path(shutil.copytree(pristine[1], tmp_path / "checkpoint"))
    spoil, match = MEGATRON_DAMAGE[damage]
    spoil(checkpoint)
    check_refused(lambda target: convert_megatron_to_hf(checkpoint, target, overwrite=True), match, tmp_path)


@pytest.mark.parametrize("tool", ["convert_hf_to_megatron.py", "convert_megatron_to_hf.py"])
def test_the_tools_print_one_line_and_end_with_1(
    pristine: tuple[Path, Path], tmp_path: Path, tool: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    to_hf = tool == "convert_megatron_to_hf.py"
    source = Path(shutil.copytree(pristine[to_hf], tmp_path / "source"))
    (MEGATRON_DAMAGE if to_hf else HF_DAMAGE)["truncated"][0](source)
    code, _, errors = run_tool(monkeypatch, capsys, tool, source, tmp_path / "out")
    assert code == 1
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert not (tmp_path / "out").exists()


def run_tool(monkeypatch: pytest.MonkeyPatch, capsys: Any, tool: str, *arguments: object) -> tuple[object, str, str]:
    """Exit status, output and errors."""
    monkeypatch.setattr(sys, "argv", [tool, *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(TOOLS / tool), run_name="__main__")
    return ended.value.code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((("--shard-gb", value), "--shard-gb must be above 0") for value in ("nan", "inf", "0", "-1")),
        *((("--threads", value), "--threads must be at least 1") for value in ("0", "-2")),
    ],
)
def test_numbers_that_make_no_sense_are_refused_before_anything_is_read(
    tmp_path: Path, arguments: tuple[str, str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    options = f"{arguments[0]}={arguments[1]}"  # argparse would take -1 for an option
    tools = ["convert_megatron_to_hf.py"] + ["convert_hf_to_megatron.py"] * (arguments[0] == "--threads")
    for tool in tools:
        code, _, errors = run_tool(monkeypatch, capsys, tool, tmp_path / "nowhere", tmp_path / "out", options)
        assert code == 2
        assert message in errors


def test_a_training_checkpoint_is_compared_with_its_sums_before_it_is_said_to_be_right(
    pristine: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """One bit of a weight is changed: nothing that the conversion itself compares can show that."""
    work = Path(shutil.copytree(pristine[1], tmp_path / "update-000001.tmp"))
    RunRecord(update=1, version=1).write(work)
    checkpoint = checkpoints.complete(work)
    to_hf, inspect, out = "convert_megatron_to_hf.py", "inspect_checkpoint.py", tmp_path / "out"
    assert run_tool(monkeypatch, capsys, to_hf, checkpoint, out, "--verify")[0] == 0
    code, text, _ = run_tool(monkeypatch, capsys, inspect, checkpoint)
    assert code == 0
    assert "every file has the SHA-256 sum that manifest.json says" in text

    row = load_file(pristine[0] / "model.safetensors")["lm_head.weight"][-1].numpy().tobytes()
    (file,) = [file for file in checkpoint.glob("*.distcp") if row in file.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.index(row)] ^= 1
    file.write_bytes(data)
    before = snapshot(out)
    reason = f"is damaged: {file.name} has another checksum than manifest.json says; use another checkpoint"
    for arguments in ((to_hf, checkpoint, out, "--verify", "--overwrite"), (inspect, checkpoint)):
        code, text, errors = run_tool(monkeypatch, capsys, *arguments)
        assert (code, text) == (1, "")
        assert errors == f"error: {checkpoint} {reason}\n"
    assert snapshot(out) == before
    code, text, _ = run_tool(monkeypatch, capsys, inspect, checkpoint, "--no-sums")
    assert code == 0
    assert "SHA-256 sums not" in text
    assert run_tool(monkeypatch, capsys, to_hf, checkpoint, out, "--overwrite")[0] == 0
    assert snapshot(out) != before


def test_a_result_with_other_files_is_replaced_only_when_asked(
    pristine: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for tool, source in (("convert_hf_to_megatron.py", pristine[0]), ("convert_megatron_to_hf.py", pristine[1])):
        out = Path(shutil.copytree(source, tmp_path / tool))
        (out / "notes.txt").write_text("mine")
        before = snapshot(out)
        code, _, errors = run_tool(monkeypatch, capsys, tool, source, out)
        assert code == 1
        assert "; choose another folder, or replace it and all that it holds with --overwrite" in errors
        assert snapshot(out) == before
        assert run_tool(monkeypatch, capsys, tool, source, out, "--overwrite")[0] == 0
        assert not (out / "notes.txt").exists()


def test_neither_conversion_replaces_what_it_reads_or_a_folder_of_other_things(
    pristine: tuple[Path, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(pristine[0], run / "model")
    shutil.copytree(pristine[1], run / "megatron")
    (run / "notes.txt").write_text("mine")
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter.txt").write_text("mine")
    link = tmp_path / "link"
    link.symlink_to(run)
    before = snapshot(tmp_path)
    for convert, source in ((convert_hf_to_megatron, run / "model"), (convert_megatron_to_hf, run / "megatron")):
        for out in (source, run, link):
            with pytest.raises(ModelError, match=r"would be replaced, and .*, which is read, with it; choose another"):
                convert(source, out)
        with pytest.raises(ModelError, match="other exists and holds neither a model nor a checkpoint"):
            convert(source, other)
        with pytest.raises(ModelError, match=r"notes\.txt is a file; choose a folder"):
            convert(source, run / "notes.txt")
    assert snapshot(tmp_path) == before


def test_a_link_to_an_earlier_result_stays_and_leads_to_the_new_one(
    pristine: tuple[Path, Path], tmp_path: Path
) -> None:
    convert_megatron_to_hf(pristine[1], tmp_path / "real")
    (tmp_path / "real" / "model.safetensors").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    convert_megatron_to_hf(pristine[1], tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]
    assert (
        load_file(tmp_path / "real" / "model.safetensors").keys() == load_file(pristine[0] / "model.safetensors").keys()
    )


def test_what_a_killed_conversion_left_is_not_taken_for_a_checkpoint(
    pristine: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(pristine[1], tmp_path / ".whole.tmp" / "whole")
    with pytest.raises(ModelError, match="holds no Megatron checkpoint"):
        find_checkpoint(tmp_path)
    shutil.copytree(pristine[1], tmp_path / "whole")
    assert find_checkpoint(tmp_path) == tmp_path / "whole"


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_a_dtype_that_weights_are_not_trained_in_is_named(
    pristine: tuple[Path, Path], tmp_path: Path, dtype: str
) -> None:
    shutil.copytree(pristine[1], tmp_path / "megatron")
    set_config(tmp_path / "megatron" / "hf", dtype=dtype)
    with pytest.raises(ModelError, match=rf"config\.json: dtype is '{dtype}'; write one of float32, bfloat16, float16"):
        convert_megatron_to_hf(tmp_path / "megatron", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
