#!/usr/bin/env python3
"""Conversion Hugging Face -> Megatron -> Hugging Face against copying the same files; the last line is JSON.

A Qwen3-MoE of random bfloat16 weights is generated. Each conversion and the copy run in a process of their own, whose
peak resident memory (with an interpreter's and torch's own) and seconds are measured; the least of several repetitions
counts. ``time_ratio_vs_copy`` is the slower direction's seconds over the copy's (``..._on_disk``: both until a sync
returned), ``peak_memory_over_model`` the larger
peak, less what the process had after its imports, over the size of the weights.

The public ``mbridge`` package is compared when it can be imported; it is no dependency of this project.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def generate(folder: Path, layers: int, experts: int, vocabulary: int) -> int:
    """Write the model, return the bytes of its weights."""
    import torch
    from transformers import Qwen3MoeConfig

    from megatron_fr.bridge import hf_tensor_specs
    from megatron_fr.bridge.save import plan_files, write_index
    from megatron_fr.bridge.tensor_file import TensorFileWriter

    config = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        moe_intermediate_size=768,
        num_experts=experts,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    folder.mkdir()
    config.save_pretrained(folder)
    files = plan_files(hf_tensor_specs(config, torch.bfloat16), 10**9)
    generator = torch.Generator().manual_seed(0)
    for name, members in files.items():
        writer = TensorFileWriter(folder / name, members)
        for spec in members:
            bits = torch.randint(-(2**15), 2**15, spec.shape, generator=generator, dtype=torch.int16)
            writer.write(spec.name, bits.view(torch.bfloat16))
        writer.close()
    write_index(folder, files)
    return sum(spec.num_bytes for members in files.values() for spec in members)


def child(kind: str, source: Path, out: Path) -> None:
    """Do one thing and print its seconds, the memory before it, and the peak, in bytes."""
    if kind == "copy":
        do: Callable[[Path, Path], object] = shutil.copytree
    else:
        from megatron_fr.bridge import read_hf_config
        from megatron_fr.bridge.to_hf import convert_megatron_to_hf
        from megatron_fr.bridge.to_megatron import convert_hf_to_megatron

        read_hf_config(source if kind == "to_megatron" else source / "hf")  # imports transformers
        do = convert_hf_to_megatron if kind == "to_megatron" else convert_megatron_to_hf
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    started = time.monotonic()
    do(source, out)
    seconds = time.monotonic() - started
    os.sync()
    on_disk = time.monotonic() - started
    print(json.dumps({"seconds": seconds, "on_disk": on_disk, "before": before, "peak": _status("VmHWM")}))


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel reports no {name}")


def measure(kind: str, source: Path, out: Path, repetitions: int) -> tuple[float, float, int]:
    """``(least seconds, least seconds until it is on disk, largest growth of memory)``; leaves ``out``."""
    seconds, on_disk, growth = [], [], []
    for _ in range(repetitions):
        shutil.rmtree(out, ignore_errors=True)
        os.sync()  # what earlier runs left to be written is not this one's time
        command = [sys.executable, __file__, "--child", kind, str(source), str(out)]
        answer = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        seconds.append(answer["seconds"])
        on_disk.append(answer["on_disk"])
        growth.append(answer["peak"] - answer["before"])
    return min(seconds), min(on_disk), max(growth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="0.3 GB instead of 2.6 GB")
    parser.add_argument("--dir", type=Path, help="where to write (default: the temporary folder)")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, source, out = arguments.child
        child(kind, Path(source), Path(out))
        return
    layers, experts, vocabulary, repetitions = (4, 16, 8003, 2) if arguments.quick else (16, 32, 32003, 3)
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        work = Path(name)
        size = generate(work / "hf", layers, experts, vocabulary)
        found = {
            "copy": measure("copy", work / "hf", work / "copy", repetitions),
            "to_megatron": measure("to_megatron", work / "hf", work / "megatron", repetitions),
            "to_hf": measure("to_hf", work / "megatron", work / "back", repetitions),
        }
        for file in (work / "hf").glob("*.safetensors"):
            if file.read_bytes() != (work / "back" / file.name).read_bytes():
                raise SystemExit(f"{file.name} came back different")
    for kind, (seconds, on_disk, memory) in found.items():
        print(
            f"{kind:12} {seconds:7.2f} s, on disk after {on_disk:7.2f} s, peak memory +{memory / 1e9:.3f} GB "
            f"({size / 1e9:.2f} GB of weights)"
        )
    if importlib.util.find_spec("mbridge") is None:
        print("mbridge: not compared, it is not installed")
    else:
        print("mbridge: not compared, it needs the model on a GPU")
    ratios = [max(found["to_megatron"][i], found["to_hf"][i]) / found["copy"][i] for i in (0, 1)]
    result = {
        "time_ratio_vs_copy": round(ratios[0], 3),
        "time_ratio_vs_copy_on_disk": round(ratios[1], 3),
        "peak_memory_over_model": round(max(memory for *_, memory in found.values()) / size, 4),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
