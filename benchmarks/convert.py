#!/usr/bin/env python3
"""Conversion Hugging Face -> Megatron -> Hugging Face against copying the same files; the last line is JSON.

A Qwen3-MoE of random bfloat16 weights is generated. One process copies and converts it in turns, after a tiny model has
paid for the imports. Seconds count until the files are on the disk, of a copy too; the least of the rounds counts.
``time_ratio_vs_copy`` is the slower direction's seconds over the copy's. ``to_hf_memory_over_bound`` is the growth of
resident memory over what is promised, one layer and one weight file; ``to_megatron_memory_over_model`` the growth over
the weights, which are all in memory.
"""

from __future__ import annotations

import argparse
import ctypes
import filecmp
import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def generate(folder: Path, file_bytes: int, layers: int, experts: int, vocabulary: int, hidden: int) -> tuple[int, int]:
    """Write the model; return the bytes of its weights and those of one layer."""
    import torch
    from transformers import Qwen3MoeConfig

    from megatron_fr.hf.export import hf_tensor_specs
    from megatron_fr.hf.folder import read_spec
    from megatron_fr.hf.weights import write_weights

    folder.mkdir()
    free: dict[str, Any] = {"head_dim": 64}  # transformers takes it as a free attribute
    Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        **free,
        moe_intermediate_size=768,
        num_experts=experts,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
        dtype="bfloat16",
    ).save_pretrained(folder)
    specs = hf_tensor_specs(read_spec(folder), torch.bfloat16)
    bits = (torch.randint(-(2**15), 2**15, spec.shape, dtype=torch.int16) for spec in specs)
    values = ((spec.name, data.view(torch.bfloat16)) for spec, data in zip(specs, bits, strict=True))
    write_weights(folder, specs, values, file_bytes)
    layer = sum(spec.num_bytes for spec in specs if spec.name.startswith("model.layers.0."))
    return sum(spec.num_bytes for spec in specs), layer


def measure(source: Path, rounds: int, file_bytes: int) -> dict[str, tuple[float, int]]:
    """Copy and convert in turns; least seconds and largest growth of memory in bytes."""
    from megatron_fr.convert.megatron import convert_hf_to_megatron, convert_megatron_to_hf

    work = source.parent
    jobs: dict[str, Callable[[], Any]] = {
        "copy": lambda: shutil.copytree(source, work / "copy"),
        "to_megatron": lambda: convert_hf_to_megatron(source, work / "to_megatron"),
        "to_hf": lambda: convert_megatron_to_hf(work / "to_megatron", work / "to_hf", shard_bytes=file_bytes),
    }
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    grown: dict[str, list[int]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, do in jobs.items():
            shutil.rmtree(work / name, ignore_errors=True)
            os.sync()  # what earlier jobs left to be written is not this one's time
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            before, started = status("VmRSS"), time.monotonic()
            do()
            os.sync()
            seconds[name].append(time.monotonic() - started)
            grown[name].append(status("VmHWM") - before)
    for file in source.glob("*.safetensors"):
        if not filecmp.cmp(file, work / "to_hf" / file.name, shallow=False):
            raise SystemExit(f"{file.name} came back different")
    return {name: (min(seconds[name]), max(grown[name])) for name in jobs}


def status(name: str) -> int:
    """A size that the kernel reports of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="0.2 GB instead of 0.8 GB, and one round")
    parser.add_argument("--dir", type=Path, help="where to write (default: the temporary folder)")
    arguments = parser.parse_args()
    file_bytes = (3 if arguments.quick else 10) * 10**7
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        for folder in ("tiny", "model"):
            (Path(name) / folder).mkdir()
        generate(Path(name) / "tiny" / "hf", file_bytes, 2, 8, 512, 64)
        measure(Path(name) / "tiny" / "hf", 1, file_bytes)
        source = Path(name) / "model" / "hf"
        size, layer = generate(source, file_bytes, 5, 8 if arguments.quick else 32, 8003, 1024)
        found = measure(source, 1 if arguments.quick else 3, file_bytes)
    for job, (seconds, grown) in found.items():
        print(f"{job:12} {seconds:6.2f} s, peak memory +{grown / 1e9:.3f} GB ({size / 1e9:.2f} GB of weights)")
    copied = found["copy"][0]
    result = {
        "benchmark": "convert",
        "time_ratio_vs_copy": round(max(found["to_megatron"][0], found["to_hf"][0]) / copied, 2),
        "to_hf_memory_over_bound": round(found["to_hf"][1] / (layer + file_bytes), 3),
        "to_megatron_memory_over_model": round(found["to_megatron"][1] / size, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
