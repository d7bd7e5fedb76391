"""Conversions without a model, against Megatron's own checkpoints of live models in several layouts."""

from __future__ import annotations

import io
import json
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_fr.errors import ConfigError, ModelError
from megatron_fr.hf.archive import PayloadFinder, frame
from megatron_fr.hf.checkpoint_files import CheckpointFiles
from megatron_fr.hf.folder import read_hf_config
from megatron_fr.hf.inspect import inspect_folder
from megatron_fr.hf.to_hf import compare, convert_megatron_to_hf
from megatron_fr.hf.to_megatron import convert_hf_to_megatron
from megatron_fr.models.registry import entries
from megatron_fr.tiny import make_untrained
from tests.support.parallel_launch import initialize_layout, run_ranks
from tests.support.small_disk import SmallDisk

#: (model, layout that the converter stores for, layout that loads it and saves it again)
CASES: list[tuple[str, dict[str, int], dict[str, int]]] = [
    ("moe", {"tensor": 2, "expert": 4}, {"expert": 2}),
    ("moe", {}, {"tensor": 2, "expert_tensor": 2}),
    ("qwen2_tied", {"tensor": 2}, {"pipeline": 2}),
    ("qwen3", {"pipeline": 2}, {"tensor": 2}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {  # 515 rows: a padding row at TP 2
        "moe": make_untrained(root / "moe", vocab_size=515),
        "qwen2_tied": make_untrained(root / "qwen2_tied", family="qwen2", tie=True, vocab_size=515),
        "qwen3": make_untrained(root / "qwen3", family="qwen3", vocab_size=515),
    }


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_equal_folders(first: Path, second: Path) -> None:
    one, two = tensors(first), tensors(second)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


def memory(name: str) -> int:
    """Bytes of this process: ``VmRSS`` now, or ``VmHWM``, the most since the mark was cleared."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def load_and_save_again(jobs: list[tuple[Path, Path, dict[str, int], Path, Path]]) -> list[list[str]]:
    """Load each converted checkpoint; return names of parameters that differ from the folder; save in Megatron's way
    twice: one name a layer, and Megatron's default of stacked layers."""
    answers = []
    for folder, converted, layout, named, stacked in jobs:
        config, device = initialize_layout(folder, layout)
        from megatron.core import dist_checkpointing, parallel_state

        from megatron_fr.checkpoint.weights_checkpoint import load_weights, save_weights
        from megatron_fr.hf.export import iter_hf_tensors
        from megatron_fr.hf.folder import read_hf_config
        from megatron_fr.trainer.model import build_model

        hf_config = read_hf_config(folder)
        chunks = build_model(hf_config, config, device)
        load_weights(chunks, converted)
        wanted = tensors(folder)
        wrong = [
            name
            for name, tensor in iter_hf_tensors(chunks, hf_config)
            if tensor is not None and not torch.equal(tensor, wanted[name])
        ]
        answers.append(wrong)
        if torch.distributed.get_rank() == 0:
            named.mkdir()
            stacked.mkdir()
        torch.distributed.barrier()
        save_weights(chunks, named)
        dist_checkpointing.save({"model": chunks[0].sharded_state_dict()}, str(stacked))
        parallel_state.destroy_model_parallel()
    return answers


@pytest.mark.slow
def test_a_conversion_loads_at_another_layout_and_what_megatron_saves_there_converts_back_bit_exactly(
    models: dict[str, Path], tmp_path: Path
) -> None:
    jobs = []
    for i, (name, stored, layout) in enumerate(CASES):
        converted = convert_hf_to_megatron(models[name], tmp_path / f"converted{i}", **stored)
        jobs.append((models[name], converted, layout, tmp_path / f"named{i}", tmp_path / f"stacked{i}"))
    for rank in run_ranks(load_and_save_again, 2, jobs=jobs):
        assert rank == [[] for _ in CASES]
    for i, (folder, converted, _, named, stacked) in enumerate(jobs):
        for j, checkpoint in enumerate((converted, named, stacked)):
            hf_dir = None if checkpoint == converted else folder
            out = convert_megatron_to_hf(checkpoint, tmp_path / f"hf{i}-{j}", hf_dir=hf_dir, verify=True)
            assert_equal_folders(folder, out)
            assert "Megatron torch_dist" in inspect_folder(checkpoint)
            assert "complete" in inspect_folder(out)


def test_several_threads_write_several_files_with_index_and_tokenizer(models: dict[str, Path], tmp_path: Path) -> None:
    source = models["qwen3"]
    there: list[str] = []
    back: list[str] = []
    checkpoint = convert_hf_to_megatron(
        source,
        tmp_path / "checkpoint",
        tensor=2,
        threads=4,
        progress=lambda name, size: there.append(name),
    )
    sizes = [file.stat().st_size for file in checkpoint.glob("*.distcp")]
    assert len(sizes) == 4
    assert max(sizes) < 0.5 * sum(sizes)
    assert len(there) == sum(len(entry.chunks) for entry in CheckpointFiles(checkpoint).tensors.values())
    out = convert_megatron_to_hf(
        checkpoint,
        tmp_path / "out",
        threads=2,
        shard_bytes=300_000,
        progress=lambda name, size: back.append(name),
    )
    assert sorted(back) == sorted(tensors(source))
    assert len(list(out.glob("*.safetensors"))) > 2
    assert_equal_folders(source, out)
    assert {file.name for file in source.iterdir()} - {"model.safetensors"} <= {file.name for file in out.iterdir()}


def test_verification_finds_a_single_changed_bit(models: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = convert_hf_to_megatron(models["moe"], tmp_path / "checkpoint")
    out = convert_megatron_to_hf(checkpoint, tmp_path / "out")
    number = len(list(entries(read_hf_config(out))))
    for threads in (1, 3, 2 * number):
        assert compare(checkpoint, out, threads=threads) == number
    weights = out / "model.safetensors"
    whole = weights.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    for name in ("layers.1.self_attn.v_proj.weight", "layers.0.mlp.experts.3.up_proj.weight", "embed_tokens.weight"):
        data = bytearray(whole)
        data[8 + length + header[f"model.{name}"]["data_offsets"][1] - 1] ^= 1
        weights.write_bytes(data)
        wanted = f"model.safetensors: tensor 'model.{name}' is not what the checkpoint holds"
        with pytest.raises(ModelError, match=re.escape(wanted)):
            compare(checkpoint, out)


def with_file_limit(limit: int, function: Callable[[], Any]) -> None:
    """Call with files limited to so many bytes, which fails a write as a full disk does."""
    import signal

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        function()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_takes_no_more_names_file_and_tensor_and_leaves_the_target_as_it_was(
    models: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = convert_hf_to_megatron(models["moe"], tmp_path / "checkpoint")
    for name in ("hf", "megatron"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("as it was")  # an earlier result
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor '(model|lm_head)\..*' cannot be written"):
        with_file_limit(500_000, lambda: convert_megatron_to_hf(checkpoint, tmp_path / "hf", overwrite=True))
    with pytest.raises(ModelError, match=r"tensor '(model|lm_head)\..*' cannot be written"):
        with_file_limit(500_000, lambda: convert_hf_to_megatron(models["moe"], tmp_path / "megatron", overwrite=True))
    for name in ("hf", "megatron"):
        assert [file.name for file in (tmp_path / name).iterdir()] == ["config.json"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checkpoint", "hf", "megatron"]


def test_a_full_disk_names_file_and_tensor_and_leaves_the_target_as_it_was(
    models: dict[str, Path], small_disk: SmallDisk
) -> None:
    disk = small_disk.folder
    checkpoint = convert_hf_to_megatron(models["moe"], disk / "megatron")
    folder = convert_megatron_to_hf(checkpoint, disk / "hf")
    before = {file: file.read_bytes() for file in (*checkpoint.rglob("*"), *folder.iterdir()) if file.is_file()}
    small_disk.fill(but=500_000)
    problem = r": tensor '(model|lm_head)\..*' cannot be written: No space left on device"
    with pytest.raises(ModelError, match=r"disk/.*/model\.safetensors" + problem):
        convert_megatron_to_hf(checkpoint, folder, overwrite=True)
    with pytest.raises(ModelError, match=r"disk/.*\.distcp" + problem):
        convert_hf_to_megatron(models["moe"], checkpoint, overwrite=True)
    small_disk.empty()
    assert {file: file.read_bytes() for file in disk.rglob("*") if file.is_file()} == before
    convert_megatron_to_hf(checkpoint, folder, verify=True, overwrite=True)


def test_damaged_checkpoints_and_layouts_that_do_not_divide_are_refused(
    models: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"--ep 3 does not divide the model's experts \(8\)"):
        convert_hf_to_megatron(models["moe"], tmp_path / "no", expert=3)
    with pytest.raises(ModelError, match="holds no Megatron checkpoint"):
        convert_megatron_to_hf(models["moe"], tmp_path / "no")
    checkpoint = convert_hf_to_megatron(models["moe"], tmp_path / "checkpoint")
    with pytest.raises(ModelError, match=r"tensor|no tensor"):
        convert_megatron_to_hf(checkpoint, tmp_path / "no", hf_dir=models["qwen3"])
    data = checkpoint / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-100_000])
    with pytest.raises(ModelError, match=r"__0_0\.distcp is cut off: tensor '"):
        convert_megatron_to_hf(checkpoint, tmp_path / "no")
    data.unlink()
    with pytest.raises(ModelError, match=r"__0_0\.distcp is missing"):
        convert_megatron_to_hf(checkpoint, tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_stored_piece_is_byte_for_byte_what_torch_saves_and_its_bytes_are_found_again(dtype: torch.dtype) -> None:
    finder = PayloadFinder()
    for shape in ((5,), (1, 3, 70)):
        tensor = torch.randn(shape).to(dtype)
        data = tensor.view(torch.uint8).numpy().tobytes()
        before, after = frame(shape, dtype)
        assert torch.equal(torch.load(io.BytesIO(before + data + after), weights_only=True), tensor)
        checked = io.BytesIO()
        torch.save(tensor, checked)
        for stored in (before + data + after, checked.getvalue()):
            start = finder.offset(io.BytesIO(stored), len(stored), shape, dtype)
            assert start is not None
            assert stored[start : start + len(data)] == data
            assert finder.offset(io.BytesIO(stored), len(stored), (*shape, 1), dtype) is None
    crossed = io.BytesIO()
    torch.save(torch.randn(4, 6).to(dtype).t(), crossed)
    crossed.seek(0)
    assert finder.offset(crossed, len(crossed.getvalue()), (6, 4), dtype) is None


def test_a_cast_there_and_back_keeps_every_bit_and_a_damaged_piece_is_named(
    models: dict[str, Path], tmp_path: Path
) -> None:
    source = models["moe"]  # of float32 weights
    rounded = convert_hf_to_megatron(source, tmp_path / "rounded", tensor=2, dtype=torch.bfloat16)
    out = tensors(convert_megatron_to_hf(rounded, tmp_path / "out"))
    for name, tensor in tensors(source).items():
        assert out[name].dtype == tensor.dtype == torch.float32
        assert torch.equal(out[name], tensor.bfloat16().float()), name
    file = rounded / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.rindex(b"PK\x05\x06")] ^= 1  # the end mark of the last piece's archive
    file.write_bytes(data)
    with pytest.raises(ModelError, match=r"__0_0\.distcp: tensor '.*' cannot be read"):
        convert_megatron_to_hf(rounded, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_a_file_cut_while_it_is_read_is_not_called_damaged(models: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = convert_hf_to_megatron(models["qwen3"], tmp_path / "checkpoint", threads=1)
    files, key = CheckpointFiles(checkpoint), "embedding.word_embeddings.weight"
    whole = files.read(key, (), files.tensors[key].size)
    assert torch.equal(whole[:-1], tensors(models["qwen3"])["model.embed_tokens.weight"][: len(whole) - 1])
    (checkpoint / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(ModelError, match=r"__0_0\.distcp: tensor 'embedding.* ends early; the file was cut") as failure:
        files.read(key, (), files.tensors[key].size)
    assert "another checkpoint" not in str(failure.value)


def test_no_flipped_bit_of_what_says_where_the_bytes_of_a_piece_begin_goes_unnoticed(
    models: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = convert_hf_to_megatron(models["qwen3"], tmp_path / "checkpoint", threads=1)
    key = "decoder.layers.0.self_attention.linear_qkv.weight"
    files = CheckpointFiles(checkpoint)
    right = files.read(key, (), files.tensors[key].size)
    info = next(info for index, info in files._storage.items() if index.fqn == key)
    path = checkpoint / info.relative_path
    pristine = path.read_bytes()
    entry = pristine.rindex(b"PK\x03\x04", 0, pristine.index(b"/data/0", info.offset))
    for bit in range(8 * 26, 8 * 30):  # lengths of the entry's name and of its padding
        data = bytearray(pristine)
        data[entry + bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            found = CheckpointFiles(checkpoint).read(key, (), files.tensors[key].size)
        except ModelError as error:
            assert key in str(error)  # noqa: PT017
        else:
            assert torch.equal(found, right), bit


def test_more_files_than_may_be_open_say_what_helps(models: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = convert_hf_to_megatron(models["moe"], tmp_path / "checkpoint", threads=16)
    convert_megatron_to_hf(checkpoint, tmp_path / "warm")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [number for number in range(1000) if not os.path.exists(f"/proc/self/fd/{number}")]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[8], hard))
    try:
        with pytest.raises(ModelError, match="Too many open files; use fewer threads, or raise the limit"):
            convert_megatron_to_hf(checkpoint, tmp_path / "out", threads=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not (tmp_path / "out").exists()


def test_a_failure_of_who_is_told_of_the_progress_is_not_the_file_s(models: dict[str, Path], tmp_path: Path) -> None:
    def tell(name: str, size: int) -> None:
        raise BrokenPipeError("nobody listens")

    with pytest.raises(BrokenPipeError, match="nobody listens"):
        convert_hf_to_megatron(models["qwen3"], tmp_path / "checkpoint", progress=tell)
    assert not list(tmp_path.iterdir())


def test_memory_stays_at_a_buffer_when_nothing_must_be_cast(tmp_path: Path) -> None:
    source = make_untrained(tmp_path / "wide", family="qwen3", vocab_size=100_003)
    convert_megatron_to_hf(convert_hf_to_megatron(source, tmp_path / "warm"), tmp_path / "warm_back")
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    convert_megatron_to_hf(convert_hf_to_megatron(source, tmp_path / "checkpoint"), tmp_path / "back")
    largest = max(tensor.nbytes for tensor in tensors(source).values())
    assert memory("VmHWM") - before < largest
    assert_equal_folders(source, tmp_path / "back")
