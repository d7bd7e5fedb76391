"""FP8 export of a tiny model, through the tool."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_fr.convert import quantize
from megatron_fr.convert.calibration import read_calibration
from megatron_fr.convert.inspect import check_quantized, inspect_folder
from megatron_fr.convert.quantize import load_quantized
from megatron_fr.errors import ModelError
from megatron_fr.rollout.state import Counters, RolloutState, encode_state
from megatron_fr.runtime.device import prepare_process, resolve_device
from megatron_fr.trajectory import Trajectory
from tests.support.small_disk import SmallDisk
from tools.tiny import make_untrained

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_exported_folder_loads_again_with_router_and_head_left_out_and_its_error_printed(tmp_path: Path) -> None:
    model, out = make_untrained(tmp_path / "model"), tmp_path / "fp8"
    lines = [json.dumps({"tokens": [(7 * i + j * j) % 500 for j in range(48)]}) for i in range(4)]
    lines += [json.dumps({"prompt": "What is 1 + 2?"})] * 2
    (tmp_path / "calibration.jsonl").write_text("\n".join(lines))
    command = [sys.executable, ROOT / "tools/quantize_hf.py", model, out]
    done = subprocess.run(
        [*map(str, command), "--calibration", str(tmp_path / "calibration.jsonl")],
        capture_output=True,
        text=True,
        timeout=200,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    error = re.search(r"mean ([\d.]+), max ([\d.]+) nats over (\d+) tokens", done.stdout)
    assert error is not None
    assert 0 < float(error[1]) < 0.5
    assert float(error[1]) <= float(error[2])
    assert check_quantized(out) == 2 * (4 + 3 * 8)  # q, k, v, o and eight experts of two layers
    assert "56 float8 tensors, each with its scale" in inspect_folder(out)
    assert {file.name for file in model.iterdir()} <= {file.name for file in out.iterdir()}
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"]
    plain, quantised = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    for name in ("model.layers.0.mlp.gate.weight", "lm_head.weight"):
        assert quantised[name].equal(plain[name].bfloat16())
    weight = "model.layers.1.mlp.experts.5.down_proj.weight"
    restored = quantised[weight].float() * quantised[f"{weight}_scale"].float()
    assert (restored - plain[weight]).abs().max() < 0.07 * plain[weight].abs().max()
    check_what_the_folder_computes(model, out, read_calibration(tmp_path / "calibration.jsonl", model), float(error[1]))


@torch.no_grad()
def check_what_the_folder_computes(model: Path, out: Path, sequences: list[torch.Tensor], printed: float) -> None:
    """The model from the disk against ModelOpt's own, quantised in memory; then with a scale changed on the disk."""
    prepare_process(resolve_device("auto"))
    import modelopt.torch.quantization as mtq
    from transformers import AutoModelForCausalLM

    def logprobs(network: Any) -> torch.Tensor:
        return torch.cat([network(ids).logits[0, :-1].float().log_softmax(-1) for ids in sequences[1::2]])

    def chosen(network: Any) -> torch.Tensor:
        return logprobs(network).gather(1, torch.cat([ids[0, 1:, None] for ids in sequences[1::2]]))

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, experts_implementation="eager").eval()
    exact = logprobs(reference)
    exact_chosen = chosen(reference)
    loaded = load_quantized(out)
    from_disk = logprobs(loaded)
    assert abs(float((chosen(loaded) - exact_chosen).abs().mean()) - printed) < 1e-4
    patterns = ("*lm_head*", "*mlp.gate.*")
    config = mtq.FP8_DEFAULT_CFG | {
        "quant_cfg": [*mtq.FP8_DEFAULT_CFG["quant_cfg"], *({"quantizer_name": p, "enable": False} for p in patterns)]
    }
    in_memory = logprobs(mtq.quantize(reference, config, lambda network: [network(ids) for ids in sequences[::2]]))
    error = (in_memory - exact).abs().mean()
    # A tenth of the weights' rounding errors differ, where bfloat16 falls between two float8 numbers.
    assert (from_disk - in_memory).abs().mean() < 0.8 * error

    tensors = load_file(out / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight_scale"] *= 30  # q and k are normalised afterwards
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    assert (logprobs(load_quantized(out)) - exact).abs().mean() > 1.5 * error
    del tensors["model.layers.1.self_attn.v_proj.input_scale"]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"no scale 'model\.layers\.1\.self_attn\.v_proj\.input_scale'"):
        load_quantized(out)


@pytest.mark.slow
def test_a_folder_that_cannot_be_read_back_replaces_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = make_untrained(tmp_path / "model", family="qwen3"), tmp_path / "fp8"
    out.mkdir()
    for name in ("config.json", "good"):
        (out / name).write_text("of an earlier export")

    def damaged(folder: Path) -> Any:
        (file,) = folder.glob("*.safetensors")
        tensors = load_file(file)
        del tensors["model.layers.1.self_attn.v_proj.input_scale"]
        save_file(tensors, file, metadata={"format": "pt"})
        return load_quantized(folder)

    monkeypatch.setattr(quantize, "load_quantized", damaged)
    with pytest.raises(ModelError, match="has no scale"):
        quantize.quantize_hf(model, out, [torch.arange(48)[None]], overwrite=True)
    assert [file.name for file in tmp_path.iterdir() if file != model] == ["fp8"]
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "good"]
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    with pytest.raises(ModelError, match=r"would be replaced, and .*, which is read, with it"):
        quantize.quantize_hf(model, model, [torch.arange(48)[None]])
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before


@pytest.mark.slow
def test_a_full_disk_is_one_error_that_names_the_file(tmp_path: Path, small_disk: SmallDisk) -> None:
    model, out = make_untrained(tmp_path / "model", family="qwen3"), small_disk.folder / "fp8"
    for room in (100_000, 375_000):  # weights take 361 kB, other files 30 kB
        small_disk.fill(but=room)
        with pytest.raises(ModelError, match=r"fp8 could not be written: .*No space left on device"):
            quantize.quantize_hf(model, out, [torch.arange(48)[None]])
        small_disk.empty()
        assert list(small_disk.folder.iterdir()) == []


def test_a_damaged_model_folder_and_a_target_in_use_are_refused_before_calibration(tmp_path: Path) -> None:
    model, out = make_untrained(tmp_path / "model", family="qwen3"), tmp_path / "fp8"
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or incomplete"):
        quantize.quantize_hf(model, out, [])
    assert not out.exists()
    weights.write_bytes(whole)
    tensors = load_file(weights)
    del tensors["model.layers.1.self_attn.v_proj.weight"]  # transformers would draw it at random
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing, among them 'model\.layers\.1\.self_attn\.v_proj\.weight'"):
        quantize.quantize_hf(model, out, [])
    assert not out.exists()
    weights.write_bytes(whole)
    out.mkdir()
    (out / "config.json").write_text("of an earlier export")
    with pytest.raises(ModelError, match=r"fp8 exists and holds config\.json; .* --overwrite"):
        quantize.quantize_hf(model, out, [])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "no"}', "neither 'tokens' (ids) nor 'prompt' (text); give one of them"),
        ("{tokens}", "no JSON: "),
        ("[1, 2, 3]", 'holds list; write an object, {"tokens": [ids]}'),
        ("null", "holds NoneType; write an object"),
        ('{"tokens": [1, "a"]}', "tokens holds 'a', expected ids, or give 'prompt'"),
        ('{"tokens": [1, null]}', "tokens holds None, expected"),
        ('{"tokens": [1, 2.5]}', "tokens holds 2.5, expected"),
        ('{"tokens": [1, true]}', "tokens holds True, expected"),
        ('{"tokens": [1, -1]}', "holds token -1, expected"),
        ('{"tokens": [1, 500]}', "holds token 500, expected ids of 0 to 499; give what was tokenized with"),
    ],
)
def test_a_calibration_line_that_is_no_sequence_is_named(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 500}'
    )
    path = tmp_path / "calibration.jsonl"
    path.write_text('{"tokens": [1, 2, 499]}\n')
    assert [ids.tolist() for ids in read_calibration(path, tmp_path)] == [[[1, 2, 499]]]
    path.write_text(f'{{"tokens": [1, 2, 3]}}\n{line}\n')
    with pytest.raises(ModelError, match=re.escape(f"calibration.jsonl:2: {reason}")):
        read_calibration(path, tmp_path)


def test_trajectories_that_wait_in_training_checkpoints_calibrate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def trajectory(name: str, tokens: list[int]) -> Trajectory:
        n = len(tokens)
        return Trajectory(
            id=name,
            prompt_id=name,
            group_id=name,
            tokens=np.array(tokens, dtype=np.int32),
            action_mask=np.arange(n) > 0,
            behavior_logprobs=np.zeros(n, dtype=np.float32),
            versions=np.zeros(n, dtype=np.int32),
            reward=0.0,
        )

    (tmp_path / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 6}'
    )
    counters = Counters(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    ready, partial = [trajectory("a", [3, 1, 4])], [trajectory("b", [1, 5])]
    (tmp_path / "rollout.state").write_bytes(encode_state(RolloutState(counters, [], {}, ready, partial)))
    for path in (tmp_path, tmp_path / "rollout.state"):
        assert [ids.tolist() for ids in read_calibration(path, tmp_path)] == [[[3, 1, 4]], [[1, 5]]]
    run = tmp_path / "run"  # whose newest checkpoint holds none, and the others one that waited in both
    for update, waiting in ((9, [*ready, trajectory("old", [2, 2])]), (20, [*partial, *ready]), (100, [])):
        (run / f"training_state/update-{update:06}").mkdir(parents=True)
        state = encode_state(RolloutState(counters, [], {}, waiting, []))
        (run / f"training_state/update-{update:06}/rollout.state").write_bytes(state)
    assert [ids.tolist() for ids in read_calibration(run, tmp_path)] == [[[1, 5]], [[3, 1, 4]], [[2, 2]]]
    assert [ids.tolist() for ids in read_calibration(run, tmp_path, limit=2)] == [[[1, 5]], [[3, 1, 4]]]
    assert len(read_calibration(run / "training_state", tmp_path)) == 3
    (run / "training_state/update-000020/rollout.state").write_bytes(b"no archive")
    assert [ids.tolist() for ids in read_calibration(run, tmp_path)] == [[[3, 1, 4]], [[2, 2]]]
    said = capsys.readouterr().err
    assert re.fullmatch(r"\S*/update-000020 is skipped: rollout state .* is damaged: .*\n", said), said
    (run / "training_state/update-000009/rollout.state").unlink()
    with pytest.raises(ModelError, match=r"/run cannot be read: .*update-000009/rollout\.state.*"):
        read_calibration(run, tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"/empty: neither a training checkpoint .* nor a run's output"):
        read_calibration(tmp_path / "empty", tmp_path)
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 5}'
    )  # another model's
    with pytest.raises(ModelError, match=r"rollout\.state, trajectory 'b': holds token 5, expected ids of 0 to 4"):
        read_calibration(tmp_path, tmp_path)
    (tmp_path / "rollout.state").write_bytes(encode_state(RolloutState(counters, [], {}, [], [])))
    with pytest.raises(ModelError, match=r"give the output folder of a run with rollout\.max_policy_lag above 0"):
        read_calibration(tmp_path, tmp_path)
    (tmp_path / "rollout.state").write_bytes(b"no archive")
    with pytest.raises(ModelError, match=r"rollout\.state cannot be read: .*damaged"):
        read_calibration(tmp_path, tmp_path)
