"""What both conversions refuse: one error that names file and tensor, and a target folder that stays as it was."""

from __future__ import annotations

import json
import os
import pickle
import re
import runpy
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_fr.checkpoint.reader import CheckedReader
from megatron_fr.convert import megatron
from megatron_fr.convert.megatron import convert_hf_to_megatron, convert_megatron_to_hf
from megatron_fr.convert.stored import StoredTensors
from megatron_fr.errors import ConfigError, ModelError
from megatron_fr.hf.folder import copy_other_files, read_spec
from megatron_fr.hf.weights import WeightFiles, open_weights
from tests.support.conversions import assert_equal_folders, convert_on_ranks, snapshot, to_megatron
from tests.support.parallel_launch import end_process, fork_process, run_ranks
from tests.support.small_disk import SmallDisk
from tools.tiny import make_untrained

pytestmark = pytest.mark.slow  # the checkpoint to damage is made on two ranks
TOOLS = Path(__file__).resolve().parents[2] / "tools"
DOWN = "model.layers.0.mlp.experts.0.down_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model folder and its Megatron checkpoint."""
    root = tmp_path_factory.mktemp("pristine")
    folder = make_untrained(root / "hf")
    return folder, to_megatron(folder, root / "megatron", ranks=2, tp=2)


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


SUPPORTED = "supported.*: .*Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM"
INDEX = "model.safetensors.index.json"
SHAPE = {"dtype": "F32", "shape": [2, "2"], "data_offsets": [0, 16]}

HF_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda f: truncate(f / "model.safetensors", 1000), r"model\.safetensors is damaged .*fully covered"),
    "missing shard": (split_and_lose_one, r"model-00002-of-00002\.safetensors is missing"),
    "wrong shape": (
        lambda f: rewrite(f, lambda t: t.update({DOWN: t[DOWN].T.contiguous()})),
        rf"{DOWN}.*\(80, 96\).*\(96, 80\)|{DOWN}.*\(96, 80\).*\(80, 96\)",
    ),
    "missing tensor": (lambda f: rewrite(f, lambda t: t.__delitem__(DOWN)), DOWN),
    "float8 without scales": (
        lambda f: rewrite(f, lambda t: t.update({DOWN: t[DOWN].to(torch.float8_e4m3fn)})),
        rf"{DOWN}' is float8_e4m3fn, numbers without their scales; give the folder that was quantised",
    ),
    "int8": (lambda f: rewrite(f, lambda t: t.update({DOWN: t[DOWN].to(torch.int8)})), rf"{DOWN}' is int8"),
    "scales": (
        lambda f: rewrite(f, lambda t: t.update({f"{DOWN}_scale_inv": torch.ones(1, 1)})),
        rf"{DOWN}_scale_inv' is the scale of a quantised one",
    ),
    "quantised": (
        lambda f: set_config(f, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
        r"config\.json: quantization_config says quantised weights; give the folder that was",
    ),
    "link to nothing": (
        lambda f: ((f / "tokenizer.json").unlink(), (f / "tokenizer.json").symlink_to("/nonexistent/blob")),
        r"tokenizer\.json is a link to /nonexistent/blob, which is not there",
    ),
    "more active experts than there are": (
        lambda f: set_config(f, num_experts_per_tok=64),
        r"config\.json.*num_experts_per_tok",
    ),
    "weights left as a pointer": (
        lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        r"model\.safetensors is damaged or incomplete",
    ),
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
    "size 0": (lambda f: set_config(f, num_attention_heads=0), r"config\.json: num_attention_heads is 0, expected"),
    "index no object": (lambda f: set_file(f / INDEX, []), r"index\.json is damaged"),
    "index of a list": (lambda f: set_file(f / INDEX, {"weight_map": ["a"]}), r"index\.json is damaged: weight_map is"),
    "header no object": (lambda f: set_header(f, 12345678), r"model\.safetensors is damaged or incomplete"),
    "header of a list": (lambda f: set_header(f, ["tensor"]), r"model\.safetensors is damaged or incomplete"),
    "header without sizes": (lambda f: set_header(f, {"w": SHAPE}), r"model\.safetensors is damaged or incomplete"),
}


def end_mark(folder: Path) -> None:
    """Change a bit of the end of the last piece's archive."""
    file = folder / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.rindex(b"PK\x05\x06")] ^= 1
    file.write_bytes(data)


def flip(folder: Path) -> None:
    """Change a bit of the last rows of the head, which no check of sizes finds."""
    row = load_file(folder.parent / "model" / "model.safetensors")["lm_head.weight"][-1].numpy().tobytes()
    (file,) = [file for file in folder.glob("*.distcp") if row in file.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.index(row)] ^= 1
    file.write_bytes(data)


class Harmful:
    """A pickle that calls a function when it is loaded."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


MEGATRON_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda f: truncate(f / "__1_0.distcp", 1000), r"__1_0\.distcp is cut off: tensor '.+'"),
    "missing shard": (lambda f: (f / "__1_0.distcp").unlink(), r"__1_0\.distcp is missing"),
    "a changed bit": (flip, r"\.distcp: tensor 'output_layer\.weight' cannot be read: .*another content than was"),
    "damaged piece": (end_mark, r"__1_0\.distcp: tensor '.*' cannot be read: .*; use another checkpoint"),
    "wrong shape": (
        lambda f: set_config(f / "hf", moe_intermediate_size=64),
        r"tensor 'decoder\..*' has shape .*config\.json implies",
    ),
    "damaged index": (lambda f: truncate(f / ".metadata", 50), r"\.metadata is damaged"),
    "index that calls": (lambda f: (f / ".metadata").write_bytes(pickle.dumps(Harmful())), r"it names posix\.mkdir"),
    "unknown architecture": (lambda f: set_config(f / "hf", architectures=["Qwen9ForCausalLM"]), "Qwen9ForCausalLM"),
    "other dtype": (
        lambda f: set_config(f / "hf", dtype="int8"),
        r"config\.json: dtype is 'int8'; write one of float32",
    ),
    "another model": (lambda f: set_config(f / "hf", num_hidden_layers=1), r"nothing uses tensor 'decoder\.layers\.1"),
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


def test_a_run_that_reads_a_checkpoint_from_elsewhere_calls_nothing_that_it_names(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(pickle.UnpicklingError, match=r"it names posix\.mkdir, which no checkpoint needs"):
        CheckedReader(tmp_path).read_metadata()
    assert not Path("harm").exists()


@pytest.mark.parametrize("damage", MEGATRON_DAMAGE)
def test_a_damaged_checkpoint_is_refused(pristine: tuple[Path, Path], tmp_path: Path, damage: str) -> None:
    checkpoint = Path(shutil.copytree(pristine[1], tmp_path / "checkpoint"))
    (tmp_path / "model").symlink_to(pristine[0])
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


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1"])
def test_numbers_that_make_no_sense_are_refused_before_anything_is_read(
    tmp_path: Path, value: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for tool, option in (("convert_megatron_to_hf.py", "--shard-gb"), ("convert_hf_to_megatron.py", "--tp")):
        code, _, errors = run_tool(monkeypatch, capsys, tool, tmp_path / "no", tmp_path / "out", f"{option}={value}")
        assert code == 2
        assert option in errors


def test_sizes_that_do_not_fit_and_a_model_too_large_for_one_process_are_refused(
    pristine: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size, message in (("ep", r"--ep=3 does not divide the model's experts \(8\)"), ("pp", "--pp=3.*layers")):
        with pytest.raises(ConfigError, match=message):
            convert_hf_to_megatron(pristine[0], tmp_path / "no", **{size: 3})
    with pytest.raises(ConfigError, match=r"2 ranks .* --pp=1"):
        to_megatron(pristine[0], tmp_path / "no", ranks=2, tp=4)
    free = type("Memory", (), {"available": 1_000_000})
    monkeypatch.setattr(megatron.psutil, "virtual_memory", lambda: free)
    with pytest.raises(ConfigError, match=r"weights take .* GB in float32, and one process has 0\.0 GB .*torchrun"):
        convert_hf_to_megatron(pristine[0], tmp_path / "no")
    shutil.copytree(pristine[0], tmp_path / "half")
    set_config(tmp_path / "half", dtype="float16")
    with pytest.raises(ConfigError, match=r"the weights are float16, .*--dtype bfloat16"):
        convert_hf_to_megatron(tmp_path / "half", tmp_path / "no")
    assert [path.name for path in tmp_path.iterdir()] == ["half"]


def test_a_result_with_other_files_is_replaced_only_when_asked(
    pristine: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    tool, source = "convert_megatron_to_hf.py", pristine[1]
    out = Path(shutil.copytree(pristine[0], tmp_path / "out"))
    (out / "notes.txt").write_text("mine")
    before = snapshot(out)
    code, _, errors = run_tool(monkeypatch, capsys, tool, source, out)
    assert code == 1
    assert "; choose another folder, or replace it and all that it holds with --overwrite" in errors
    assert snapshot(out) == before
    code, text, _ = run_tool(monkeypatch, capsys, tool, source, out, "--overwrite", "--verify")
    assert code == 0
    assert re.search(r"out: \d\.\d+ GB in \d+\.\d s, verified", text)
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
    wanted = {
        **dict.fromkeys((run, link), r"would be replaced, and .*, which is read, with it; choose another"),
        other: "other exists and holds neither a model nor a checkpoint",
        run / "notes.txt": r"notes\.txt is a file; choose a folder",
    }
    targets = [run / "model", *wanted]
    jobs = [{"hf_dir": run / "model", "out_dir": out} for out in targets]
    (errors,) = run_ranks(convert_on_ranks, 1, jobs=jobs)
    for out, error in zip(targets, errors, strict=True):
        assert error is not None
        assert error[0] == "ModelError"
        assert re.search(wanted.get(out, "would be replaced"), error[1])
    for out in (run / "megatron", *wanted):
        with pytest.raises(ModelError, match=wanted.get(out, "would be replaced")):
            convert_megatron_to_hf(run / "megatron", out)
    assert snapshot(tmp_path) == before


def test_a_link_to_an_earlier_result_stays_and_leads_to_the_new_one(
    pristine: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "config.json").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    convert_megatron_to_hf(pristine[1], tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]
    assert_equal_folders(pristine[0], tmp_path / "real")


def convert_on_small_disk(source: Path, checkpoint: Path, disk: SmallDisk) -> list[Any]:
    """On a rank: both conversions over earlier results on a disk that is full; their errors."""
    disk.fill(but=500_000)
    errors = convert_on_ranks([{"hf_dir": source, "out_dir": disk.folder / "megatron", "overwrite": True}])
    try:
        convert_megatron_to_hf(checkpoint, disk.folder / "hf", overwrite=True)
    except ModelError as error:
        errors.append(("ModelError", str(error)))
    disk.empty()
    return errors


def test_a_full_disk_is_one_error_and_leaves_the_target_as_it_was(
    pristine: tuple[Path, Path], small_disk: SmallDisk
) -> None:
    disk = small_disk.folder
    shutil.copytree(pristine[0], disk / "hf")
    shutil.copytree(pristine[1], disk / "megatron")
    before = snapshot(disk)
    (errors,) = run_ranks(convert_on_small_disk, 1, source=pristine[0], checkpoint=pristine[1], disk=small_disk)
    for name, error in zip((r"\.megatron\.tmp", "hf"), errors, strict=True):
        assert re.search(rf"disk/{name} could not be written.*No space left on device", error[1]), error
        assert "\n" not in error[1]
    assert snapshot(disk) == before
    convert_megatron_to_hf(pristine[1], disk / "hf", verify=True, overwrite=True)


def stop_half_way(kind: str, source: Path, out: Path) -> None:
    """Convert in this process, and wait where the weights are written and the folder has not its name."""

    def wait(*_: object) -> None:
        (out.parent / "reached").touch()
        time.sleep(60)

    torch.set_num_threads(1)
    megatron.copy_other_files = wait
    convert_megatron_to_hf(source, out) if kind == "hf" else convert_hf_to_megatron(source, out)


@pytest.mark.parametrize("kind", ["hf", "megatron"])
def test_a_killed_conversion_leaves_no_result_and_the_next_one_cleans_up(
    pristine: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    source, out = pristine[kind == "hf"], tmp_path / "results" / "out"
    out.parent.mkdir()
    process = fork_process(stop_half_way, tmp_path / "log", {}, kind, source, out)
    deadline = time.monotonic() + 120
    while not (out.parent / "reached").exists():
        assert process.exitcode is None, (tmp_path / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    end_process(process)
    (out.parent / "reached").unlink()
    assert [path.name for path in out.parent.iterdir()] == [".out.tmp"]
    convert_megatron_to_hf(source, out) if kind == "hf" else to_megatron(source, out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    if kind == "megatron":
        assert StoredTensors(out).tensors.keys() == StoredTensors(pristine[1]).tensors.keys()


def test_conversion_onto_a_folder_that_another_one_writes_is_refused(
    pristine: tuple[Path, Path], tmp_path: Path
) -> None:
    from megatron_fr.hf.atomic import atomic_folder

    with atomic_folder(tmp_path / "out") as work:
        (work / "config.json").write_text("first")
        with pytest.raises(ModelError, match=r"another process writes .*out; wait"):
            convert_megatron_to_hf(pristine[1], tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "first"


def test_a_tied_model_whose_file_has_another_head_is_refused(tmp_path: Path) -> None:
    folder = make_untrained(tmp_path / "model", family="qwen2", tie=True)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    open_weights(folder, read_spec(folder))
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * 2}))
    with pytest.raises(ModelError, match=r"'lm_head\.weight' differs from .*tie_word_embeddings: true; write false"):
        open_weights(folder, read_spec(folder))


def test_of_a_tensor_in_two_files_the_index_names_the_one(tmp_path: Path) -> None:
    folder = make_untrained(tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    other = torch.zeros_like(stored[DOWN])
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({DOWN: other, "only.here": other.clone()}, folder / "b.safetensors", metadata={"format": "pt"})
    for file, expected in (("a.safetensors", stored[DOWN]), ("b.safetensors", other)):
        where = dict.fromkeys(stored, "a.safetensors") | {"only.here": "b.safetensors", DOWN: file}
        (folder / INDEX).write_text(json.dumps({"weight_map": where}))
        torch.testing.assert_close(WeightFiles(folder).tensor(DOWN), expected)


def test_a_folder_without_a_tokenizer_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_untrained(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (tmp_path / "out").mkdir()
    copy_other_files(folder, tmp_path / "out")
    assert "holds no tokenizer" in capsys.readouterr().err
