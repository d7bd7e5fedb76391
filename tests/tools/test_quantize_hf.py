"""FP8 export of a tiny model, through the tool."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_fr.errors import ModelError
from megatron_fr.quantize import check_quantized, read_calibration
from megatron_fr.tiny import make_untrained

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
    assert {file.name for file in model.iterdir()} <= {file.name for file in out.iterdir()}
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"]
    plain, quantised = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    for name in ("model.layers.0.mlp.gate.weight", "lm_head.weight"):
        assert quantised[name].equal(plain[name].bfloat16())
    weight = "model.layers.1.mlp.experts.5.down_proj.weight"
    restored = quantised[weight].float() * quantised[f"{weight}_scale"].float()
    assert (restored - plain[weight]).abs().max() < 0.07 * plain[weight].abs().max()


def test_calibration_that_holds_no_tokens_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "calibration.jsonl"
    path.write_text('{"tokens": [1, 2, 3]}\n{"text": "no"}\n')
    with pytest.raises(ModelError, match=r"calibration\.jsonl:2: neither 'tokens'"):
        read_calibration(path, tmp_path)
