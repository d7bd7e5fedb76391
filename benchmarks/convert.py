#!/usr/bin/env python3
"""Conversion Hugging Face -> Megatron -> Hugging Face against copying the same files; the last line is JSON.

A Qwen3-MoE of random bfloat16 weights is generated. One process copies and converts it in turns, each twice in a row;
the least seconds and the largest growth of resident memory count. (Where a virtual machine gives free memory back to
its host, the first to write there waits for the host, several times as long as for the write itself. The second of two
finds the memory that the first one's files had.) ``time_ratio_vs_copy`` is the slower direction's seconds over the
copy's (``..._on_disk``: both until a sync returned), ``peak_memory_over_model`` the largest growth over the size of the
weights.

Then two trainer ranks load the folder into a model and save it (``load_hf_weights``, ``save_hf_folder``), at TP 2 and
at EP 2. ``load_memory_over_layer`` and ``save_memory_over_layer`` are the most that any rank's resident memory rose
above its level with the model in it, over the bytes of one decoder layer.

The public ``mbridge`` package is compared where it can be imported (it is no dependency of this project): one rank on a
CPU loads the folder into the same local-spec model and saves it, with mbridge and with this project. As it is, mbridge
0.15.1 does neither there. Its ``get_model`` stops at ``ModelType.encoder_and_decoder``, which Megatron-Core 0.19 has
not, and asks for Transformer Engine's layers; its ``load_weights`` into a model of local layers says ``Unsupported
parameter name: decoder.layers.0.input_layernorm.weight``. So it gets a model that is already built and, from
:func:`mbridge_for_local_layers`, the names of local layers; the rest is its own.
"""

from __future__ import annotations

import argparse
import ctypes
import filecmp
import functools
import gc
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_fr.config import RunConfig


def generate(folder: Path, file_bytes: int, layers: int, experts: int, vocabulary: int) -> tuple[int, int]:
    """Write the model, return the bytes of its weights and those of one layer."""
    import torch
    from transformers import Qwen3MoeConfig

    from megatron_fr.hf.export import hf_tensor_specs
    from megatron_fr.hf.save import plan_files, write_index
    from megatron_fr.hf.tensor_file import TensorFileWriter

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
    files = plan_files(hf_tensor_specs(config, torch.bfloat16), file_bytes)
    generator = torch.Generator().manual_seed(0)
    for name, members in files.items():
        with TensorFileWriter(folder / name, members) as writer:
            for spec in members:
                bits = torch.randint(-(2**15), 2**15, spec.shape, generator=generator, dtype=torch.int16)
                writer.write(spec.name, bits.view(torch.bfloat16))
    write_index(folder, files)
    specs = [spec for members in files.values() for spec in members]
    layer = sum(spec.num_bytes for spec in specs if spec.name.startswith("model.layers.0."))
    return sum(spec.num_bytes for spec in specs), layer


def convert(
    source: Path, rounds: int, file_bytes: int, shape: tuple[int, int, int]
) -> tuple[int, int, dict[str, list[float]]]:
    """Generate the folder, then copy and convert it in turns.

    Returns:
        as :func:`generate`, and for each kind least seconds, least seconds until on disk, largest growth in bytes.
    """
    size, layer = generate(source, file_bytes, *shape)
    from megatron_fr.hf.folder import read_hf_config
    from megatron_fr.hf.to_hf import convert_megatron_to_hf
    from megatron_fr.hf.to_megatron import convert_hf_to_megatron

    read_hf_config(source)  # its imports are no conversion's time
    work = source.parent
    jobs: dict[str, tuple[Callable[..., object], Path, Path]] = {
        "copy": (shutil.copytree, source, work / "copy"),
        "to_megatron": (convert_hf_to_megatron, source, work / "megatron"),
        "to_hf": (functools.partial(convert_megatron_to_hf, shard_bytes=file_bytes), work / "megatron", work / "back"),
    }
    samples: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in jobs}
    for _ in range(rounds):
        for kind in [kind for kind in jobs for _ in range(2)]:
            do, origin, out = jobs[kind]
            shutil.rmtree(out, ignore_errors=True)
            os.sync()  # what earlier runs left to be written is not this one's time
            before = reset_peak()
            started = time.monotonic()
            do(origin, out)
            seconds = time.monotonic() - started
            os.sync()
            samples[kind].append((seconds, time.monotonic() - started, status("VmHWM") - before))
    least = {
        kind: [min(s for s, _, _ in found), min(d for _, d, _ in found), max(m for _, _, m in found)]
        for kind, found in samples.items()
    }
    return size, layer, least


def convert_then_load(
    source: Path, rounds: int, file_bytes: int, shape: tuple[int, int, int], layouts: list[dict[str, int]]
) -> list[Any]:
    """On rank 0 :func:`convert`, whose answer comes first; on all ranks then :func:`load_and_save`.

    One after the other in the same processes, since their imports take longer than most of what is measured.
    """
    converted = None
    if os.environ["RANK"] == "0":
        converted = convert(source, rounds, file_bytes, shape)
        same_files(source, source.parent / "back")
        for folder in ("copy", "megatron", "back"):
            shutil.rmtree(source.parent / folder)
    return [converted, load_and_save(source, file_bytes, layouts, "megatron_fr")]


def load_and_save(
    source: Path, file_bytes: int, layouts: list[dict[str, int]], package: str
) -> list[list[list[float]]]:
    """On every rank, for each layout ``[seconds, growth in bytes]`` of loading the folder and of saving it again."""
    from megatron_fr.runtime.device import prepare_process, resolve_device

    prepare_process(resolve_device("cpu"))
    from megatron_fr.trainer import distributed

    answers = []
    for number, layout in enumerate(layouts):
        config = run_config(source, layout)
        device = resolve_device("cpu")
        distributed.initialize(config.parallel, device, seed=1, timeout_s=300)
        from megatron.core import parallel_state

        answers.append([timed(step) for step in steps(config, source, file_bytes, package, number)])
        parallel_state.destroy_model_parallel()
    return answers


def run_config(source: Path, layout: dict[str, int]) -> RunConfig:
    """A trainer's configuration for the folder, of which only model and layout matter here."""
    from megatron_fr.config import RunConfig

    return RunConfig.model_validate(
        {
            "model": {"path": str(source), "dtype": "bfloat16"},
            "parallel": {"world_size": int(os.environ["WORLD_SIZE"]), **layout},
            "train": {"num_updates": 1, "batch_size": 2},
            "reward": {"function": "unused:unused"},
            "data": {"train": "unused.jsonl"},
        }
    )


def steps(
    config: RunConfig, source: Path, file_bytes: int, package: str, number: int
) -> Iterator[Callable[[], object]]:
    """Build the model, then give what loads the folder into it, and what saves it beside the folder."""
    from megatron_fr.hf.folder import read_hf_config
    from megatron_fr.hf.load import load_hf_weights
    from megatron_fr.hf.save import save_hf_folder
    from megatron_fr.runtime.device import resolve_device
    from megatron_fr.trainer.model import build_model

    hf_config, out = read_hf_config(source), source.parent / f"saved_by_{package}_{number}"
    chunks = build_model(hf_config, config, resolve_device("cpu"))
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        parameter.data.fill_(1.0)  # all of the model's memory is the process's before the first measurement
    if package == "mbridge":
        bridge = mbridge_for_local_layers(source)
        yield lambda: bridge.load_weights(chunks, str(source))
        yield lambda: bridge.save_weights(chunks, str(out))
    else:
        yield lambda: load_hf_weights(chunks, hf_config, source)
        yield lambda: save_hf_folder(chunks, hf_config, source, out, shard_bytes=file_bytes)


def timed(step: Callable[[], object]) -> list[float]:
    """``[seconds, growth of resident memory in bytes]``."""
    import torch.distributed as dist

    os.sync()  # what earlier steps left to be written is not this one's time
    before = reset_peak()
    dist.barrier()  # nor is what another rank is still busy with
    started = time.monotonic()
    step()
    return [time.monotonic() - started, float(status("VmHWM") - before)]


def mbridge_for_local_layers(source: Path) -> Any:
    """mbridge's bridge for the folder, told what Megatron-Core's local layers call their parameters."""
    import re

    from mbridge import AutoBridge

    kind = type(AutoBridge.from_pretrained(str(source)))

    class ForLocalLayers(kind):  # type: ignore[misc, valid-type]
        def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> Any:
            name = mcore_weights_name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
            name = re.sub(r"\.local_experts\.(\d+)\.(linear_fc\d)\.weight", r".\2.weight\1", name)
            return super()._weight_name_mapping_mcore_to_hf(name)

    from transformers import AutoConfig

    return ForLocalLayers(AutoConfig.from_pretrained(source))


def reset_peak() -> int:
    """Give freed memory back, reset the mark of resident memory, and return its level in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(name: str) -> int:
    """A size that the kernel reports of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel reports no {name}")


def start(call: dict[str, Any], world_size: int = 1) -> list[Any]:
    """Call a function of this file in processes of their own; their answers in rank order."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    names = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    names |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, "--child", json.dumps(call)]
    ranks = [
        subprocess.Popen(
            command, env=os.environ | names | {"RANK": str(i), "LOCAL_RANK": str(i)}, stdout=subprocess.PIPE, text=True
        )
        for i in range(world_size)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{call['function']} failed, see above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def same_files(first: Path, second: Path) -> None:
    for file in first.glob("*.safetensors"):
        if not filecmp.cmp(file, second / file.name, shallow=False):
            raise SystemExit(f"{second / file.name} came back different")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="0.3 GB instead of 2 GB, and TP 2 only")
    parser.add_argument("--dir", type=Path, help="where to write (default: the temporary folder)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        call = json.loads(arguments.child)
        function = {"convert_then_load": convert_then_load, "load_and_save": load_and_save}[call.pop("function")]
        print(json.dumps(function(source=Path(call.pop("source")), **call)))  # type: ignore[operator]
        return
    shape = (3, 16, 8003) if arguments.quick else (12, 32, 32003)  # layers, experts, vocabulary
    file_bytes = 12 * 10**7 if arguments.quick else 10**9  # three files, as threads write a file each
    result: dict[str, Any] = {"benchmark": "convert"}
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        source = Path(name) / "hf"
        layouts = [{"tensor": 2}] if arguments.quick else [{"tensor": 2}, {"expert": 2}]
        rounds = 1 if arguments.quick else 4
        call = {"function": "convert_then_load", "source": str(source), "rounds": rounds, "file_bytes": file_bytes}
        converted, ranks = zip(*start(call | {"shape": shape, "layouts": layouts}, 2), strict=True)
        size, layer, found = converted[0]
        for kind, (seconds, on_disk, memory) in found.items():
            print(
                f"{kind:12} {seconds:7.2f} s, on disk after {on_disk:7.2f} s, peak memory +{memory / 1e9:.3f} GB "
                f"({size / 1e9:.2f} GB of weights)",
                flush=True,
            )
        for i, key in enumerate(("time_ratio_vs_copy", "time_ratio_vs_copy_on_disk")):
            result[key] = round(max(found["to_megatron"][i], found["to_hf"][i]) / found["copy"][i], 3)
        result["peak_memory_over_model"] = round(max(memory for *_, memory in found.values()) / size, 4)
        result |= {"load_memory_over_layer": 0.0, "save_memory_over_layer": 0.0}
        for number, layout in enumerate(layouts):
            same_files(source, source.parent / f"saved_by_megatron_fr_{number}")
            for i, step in enumerate(("load", "save")):
                seconds, memory = (max(rank[number][i][which] for rank in ranks) for which in (0, 1))
                key = f"{step}_memory_over_layer"
                result[key] = max(result[key], round(memory / layer, 3))
                print(
                    f"{step} on two ranks, {layout}: {seconds:.2f} s, peak memory +{memory / 1e6:.1f} MB "
                    f"(a layer has {layer / 1e6:.1f} MB)",
                    flush=True,
                )
        if importlib.util.find_spec("mbridge") is None:
            print("mbridge: not compared, it is not installed")
        else:
            result |= compare_mbridge(source, file_bytes)
    print(json.dumps(result))


def compare_mbridge(source: Path, file_bytes: int) -> dict[str, float]:
    """This project's seconds and peak memory over mbridge's, loading and saving on one rank."""
    call = {"function": "load_and_save", "source": str(source), "file_bytes": file_bytes, "layouts": [{}]}
    ((theirs,),) = start(call | {"package": "mbridge"})
    ((ours,),) = start(call | {"package": "megatron_fr"})
    ratios = {}
    for i, step in enumerate(("load", "save")):
        print(
            f"{step} on one rank: {ours[i][0]:.2f} s, peak memory +{ours[i][1] / 1e6:.1f} MB; "
            f"mbridge {theirs[i][0]:.2f} s, +{theirs[i][1] / 1e6:.1f} MB"
        )
        ratios[f"{step}_time_ratio_vs_mbridge"] = round(ours[i][0] / theirs[i][0], 3)
        ratios[f"{step}_memory_ratio_vs_mbridge"] = round(ours[i][1] / theirs[i][1], 4)
    return ratios


if __name__ == "__main__":
    main()
