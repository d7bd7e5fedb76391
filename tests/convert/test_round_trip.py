"""Conversions there and back, against Megatron's own checkpoints of live models in several layouts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_fr.convert.inspect import inspect_folder
from megatron_fr.convert.megatron import compare, convert_megatron_to_hf
from megatron_fr.convert.stored import find_checkpoint
from megatron_fr.errors import ModelError
from megatron_fr.hf.export import hf_tensor_specs
from megatron_fr.hf.folder import read_spec
from megatron_fr.hf.weights import write_weights
from tests.support.conversions import assert_equal_folders, convert_on_ranks, tensors
from tests.support.parallel_launch import initialize_layout, run_ranks
from tools.tiny import make_untrained

pytestmark = pytest.mark.slow
FILE_BYTES = 20_000_000
#: (model, sizes of the conversion on two ranks, layout that loads it and saves it again)
CASES: list[tuple[str, dict[str, int], dict[str, int]]] = [
    ("moe", {"tp": 2}, {"ep": 2}),
    ("moe", {"ep": 2}, {"tp": 2, "etp": 2}),
    ("qwen2_tied", {"tp": 2}, {"pp": 2}),
    ("qwen3", {"pp": 2}, {"tp": 2}),
    ("glm", {"tp": 2}, {"ep": 2}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {  # 515 rows: a padding row at TP 2
        "moe": make_untrained(root / "moe", vocab_size=515),
        "qwen2_tied": make_untrained(root / "qwen2_tied", family="qwen2", tie=True, vocab_size=515),
        "qwen3": make_untrained(root / "qwen3", family="qwen3", vocab_size=515),
        "glm": make_untrained(root / "glm", family="glm4_moe", vocab_size=515),
    }


@pytest.fixture(scope="module")
def wide(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose eight layers are large beside what a process takes anyway."""
    from transformers import AutoConfig

    folder = tmp_path_factory.mktemp("wide") / "model"
    folder.mkdir()
    config = AutoConfig.from_pretrained(models["moe"])
    config.num_hidden_layers, config.hidden_size, config.moe_intermediate_size = 8, 512, 512
    config.save_pretrained(folder)
    specs = hf_tensor_specs(read_spec(folder), torch.float32)
    write_weights(folder, specs, ((spec.name, torch.randn(spec.shape)) for spec in specs), FILE_BYTES)
    return folder


@pytest.fixture(scope="module")
def alone(models: dict[str, Path], wide: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints that one process wrote, for layouts that it does not have."""
    root = tmp_path_factory.mktemp("alone")
    conversions: dict[str, dict[str, Any]] = {
        "moe": {"hf_dir": models["moe"], "tp": 2, "ep": 4},
        "qwen2_tied": {"hf_dir": models["qwen2_tied"], "tp": 2},
        "qwen3": {"hf_dir": models["qwen3"], "pp": 2},
        "glm": {"hf_dir": models["glm"], "ep": 2},
        "rounded": {"hf_dir": models["moe"], "dtype": "bfloat16"},
        "wide": {"hf_dir": wide},
    }
    jobs = [{"out_dir": root / name, "verify": True, **options} for name, options in conversions.items()]
    assert run_ranks(convert_on_ranks, 1, jobs=jobs) == [[None] * len(jobs)]
    return {name: root / name for name in conversions}


def load_and_save_again(jobs: list[tuple[Path, dict[str, Any], dict[str, int], Path, Path]]) -> list[list[str]]:
    """Convert on these ranks and load that in another layout; return names of parameters that differ from the folder.

    Save in Megatron's way twice: one name a layer, and Megatron's default of stacked layers.
    """
    answers = []
    for folder, conversion, layout, named, stacked in jobs:
        assert convert_on_ranks([conversion]) == [None]
        config, device = initialize_layout(folder, layout)
        from megatron.core import dist_checkpointing, parallel_state

        from megatron_fr.checkpoint.io import load_weights, save_weights
        from megatron_fr.hf.export import iter_hf_tensors
        from megatron_fr.trainer.model import build_model

        model = read_spec(folder)
        chunks = build_model(model, config, device)
        load_weights(chunks, conversion["out_dir"])
        wanted = tensors(folder)
        wrong = [
            name
            for name, tensor in iter_hf_tensors(chunks, model)
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


def test_ranks_convert_another_layout_loads_it_and_what_megatron_saves_there_converts_back_bit_exactly(
    models: dict[str, Path], alone: dict[str, Path], tmp_path: Path
) -> None:
    jobs = []
    for i, (name, sizes, layout) in enumerate(CASES):
        conversion = {"hf_dir": models[name], "out_dir": tmp_path / f"converted{i}", "verify": True, **sizes}
        jobs.append((models[name], conversion, layout, tmp_path / f"named{i}", tmp_path / f"stacked{i}"))
    for rank in run_ranks(load_and_save_again, 2, jobs=jobs):
        assert rank == [[] for _ in CASES]
    for i, (name, _, _) in enumerate(CASES):
        for kind in ("converted", "named", "stacked"):
            checkpoint = tmp_path / f"{kind}{i}"
            hf_dir = None if kind == "converted" else models[name]
            out = convert_megatron_to_hf(checkpoint, tmp_path / f"hf-{kind}{i}", hf_dir=hf_dir, verify=True)
            assert_equal_folders(models[name], out)
            assert "Megatron torch_dist" in inspect_folder(checkpoint)
            assert "complete" in inspect_folder(out)
    for name in models.keys() & alone.keys():
        assert_equal_folders(models[name], convert_megatron_to_hf(alone[name], tmp_path / f"hf-{name}", verify=True))


def test_transformers_loads_what_comes_back_in_several_files_with_tokenizer(
    models: dict[str, Path], alone: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    source = models["moe"]
    out = convert_megatron_to_hf(alone["moe"], tmp_path / "out", shard_bytes=300_000)
    assert len(list(out.glob("*.safetensors"))) > 2
    assert {file.name for file in source.iterdir()} - {"model.safetensors"} <= {file.name for file in out.iterdir()}
    ids = torch.arange(40)[None]
    logits = []
    for folder in (source, out):
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert not info["missing_keys"] | info["unexpected_keys"]
        with torch.no_grad():
            logits.append(model.eval()(ids).logits)
    assert torch.equal(*logits)


def test_verification_finds_a_single_changed_bit(
    models: dict[str, Path], alone: dict[str, Path], tmp_path: Path
) -> None:
    out = convert_megatron_to_hf(alone["moe"], tmp_path / "out")
    model = read_spec(out)
    assert compare(alone["moe"], out, model) == len(list(model.parameters()))
    weights = out / "model.safetensors"
    whole = weights.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    for name in ("layers.1.self_attn.v_proj.weight", "layers.0.mlp.experts.3.up_proj.weight", "embed_tokens.weight"):
        data = bytearray(whole)
        data[8 + length + header[f"model.{name}"]["data_offsets"][1] - 1] ^= 1
        weights.write_bytes(data)
        with pytest.raises(ModelError, match=re.escape(f"model.safetensors: tensor 'model.{name}' is not what")):
            compare(alone["moe"], out, model)


def test_a_cast_there_and_back_keeps_every_bit(models: dict[str, Path], alone: dict[str, Path], tmp_path: Path) -> None:
    source = models["moe"]  # of float32 weights
    out = tensors(convert_megatron_to_hf(alone["rounded"], tmp_path / "out", verify=True))
    for name, tensor in tensors(source).items():
        assert out[name].dtype == tensor.dtype == torch.float32
        assert torch.equal(out[name], tensor.bfloat16().float()), name


def test_what_a_killed_conversion_left_is_not_taken_for_a_checkpoint(alone: dict[str, Path], tmp_path: Path) -> None:
    alone["qwen3"].rename(tmp_path / ".whole.tmp")
    try:
        with pytest.raises(ModelError, match="holds no Megatron checkpoint"):
            find_checkpoint(tmp_path)
    finally:
        (tmp_path / ".whole.tmp").rename(alone["qwen3"])
    (tmp_path / "link").symlink_to(alone["qwen3"])
    assert find_checkpoint(tmp_path / "link") == tmp_path / "link"


def start_a_run(model: Path, weights: Path) -> dict[str, torch.Tensor]:
    """On a rank: the weights that a run starts with, on rank 0."""
    config, device = initialize_layout(model, {"tp": 2})
    from megatron_fr.trainer.policy import build_policy

    policy = build_policy(
        config.model_copy(update={"model": config.model.model_copy(update={"weights": weights})}), device
    )
    return {name: tensor.clone() for name, tensor in policy.hf_tensors() if tensor is not None}


def test_a_run_starts_from_a_checkpoint_in_place_of_the_weights_of_its_model(
    models: dict[str, Path], alone: dict[str, Path], tmp_path: Path
) -> None:
    other = make_untrained(tmp_path / "other", family="qwen3", vocab_size=515, seed=1)
    found = run_ranks(start_a_run, 2, model=other, weights=alone["qwen3"])[0]
    wanted = tensors(models["qwen3"])
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def memory(name: str) -> int:
    """Bytes of this process: ``VmRSS`` now, or ``VmHWM``, the most since the mark was cleared."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def grow(jobs: list[tuple[Path, Path, int]]) -> list[int]:
    """On a rank: convert checkpoints to Hugging Face folders; bytes of memory that each took above what there was."""
    grown = []
    for checkpoint, out, shard_bytes in jobs:
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        convert_megatron_to_hf(checkpoint, out, shard_bytes=shard_bytes)
        grown.append(memory("VmHWM") - before)
    return grown


def test_memory_stays_at_one_layer_and_one_file(alone: dict[str, Path], wide: Path, tmp_path: Path) -> None:
    specs = hf_tensor_specs(read_spec(wide), torch.float32)
    layer = sum(spec.num_bytes for spec in specs if spec.name.startswith("model.layers.0."))
    total = sum(spec.num_bytes for spec in specs)
    # The first one, small, pays for the imports.
    jobs = [(alone["moe"], tmp_path / "warm", FILE_BYTES), (alone["wide"], tmp_path / "back", FILE_BYTES)]
    ((_, grown),) = run_ranks(grow, 1, jobs=jobs)
    assert grown < 1.25 * (layer + FILE_BYTES) + 8_000_000 < 0.5 * total
    for file in (tmp_path / "back").glob("*.safetensors"):
        assert sum(tensor.nbytes for tensor in load_file(file).values()) <= FILE_BYTES
    assert_equal_folders(wide, tmp_path / "back")
