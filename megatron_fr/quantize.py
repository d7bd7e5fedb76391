"""FP8 export of a Hugging Face folder with NVIDIA ModelOpt, calibrated on recorded trajectories."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_fr.bridge.atomic import atomic_folder
from megatron_fr.bridge.folder import copy_other_files, read_hf_config, resolve_folder
from megatron_fr.device import prepare_process, resolve_device
from megatron_fr.errors import ModelError
from megatron_fr.trajectory import decode

#: Left in the model's own dtype: the head's errors are log-probability errors, and a changed router chooses others.
_LEFT_OUT = ("*lm_head*", "*mlp.gate.*")


def read_calibration(path: str | Path, folder: str | Path, *, limit: int = 64, max_tokens: int = 4096) -> list[Any]:
    """Token ids from an archive of trajectories (npz) or JSONL with ``tokens`` or ``prompt`` in each line.

    Returns:
        int64 tensors ``[1, tokens]``, at most ``limit``.

    Raises:
        ModelError: the file holds neither; names the line.
    """
    path = Path(path)
    if path.suffix == ".npz":
        rows = [trajectory.tokens.tolist() for trajectory in decode(path.read_bytes())]
    else:
        rows = [_read_line(path, number, line, folder) for number, line in enumerate(path.open(), 1) if line.strip()]
    kept = [torch.tensor([row[:max_tokens]], dtype=torch.int64) for row in rows[:limit] if len(row) > 1]
    if not kept:
        raise ModelError(f"{path} holds no sequence of two or more tokens to calibrate with")
    return kept


def _read_line(path: Path, number: int, line: str, folder: str | Path) -> list[int]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ModelError(f"{path}:{number}: no JSON: {error}") from error
    if isinstance(row.get("tokens"), list):
        return [int(token) for token in row["tokens"]]
    if isinstance(row.get("prompt"), str):
        from transformers import AutoTokenizer

        return list(AutoTokenizer.from_pretrained(folder)(row["prompt"])["input_ids"])
    raise ModelError(f"{path}:{number}: neither 'tokens' (ids) nor 'prompt' (text)")


@torch.no_grad()
def quantize_hf(hf_dir: str | Path, out_dir: str | Path, calibration: Sequence[torch.Tensor]) -> dict[str, float]:
    """Write ``out_dir`` with FP8 weights and scales, and compare its log-probabilities with the folder's in bfloat16.

    Args:
        calibration: int64 ``[1, tokens]`` each, whose activations set the scales; half of them, the odd ones, are
            kept out where there are two or more, and compared.

    Returns:
        ``mean`` and ``max`` of the absolute difference of next-token log-probabilities, in nats; ``tokens`` compared.

    Raises:
        ModelError: the model cannot be loaded, or the written folder cannot be read back.
    """
    prepare_process(resolve_device("auto"))  # ModelOpt imports Megatron-Core
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    source = resolve_folder(hf_dir)
    read_hf_config(source)
    held_out = list(calibration[1::2]) or list(calibration)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    before = [_logprobs(model, ids) for ids in held_out]

    def forward(quantized: Any) -> None:
        for ids in calibration[::2]:
            quantized(ids.to(quantized.device))

    config = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    for pattern in _LEFT_OUT:
        config["quant_cfg"].append({"quantizer_name": pattern, "enable": False})
    model = mtq.quantize(model, config, forward)
    after = [_logprobs(model, ids) for ids in held_out]
    with atomic_folder(out_dir) as work:
        export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=work)
        written = {file.name: file.read_bytes() for file in work.glob("*.json")}
        copy_other_files(source, work)
        for name, data in written.items():  # the exporter's configuration describes the quantisation
            if name.endswith("config.json") and name != "generation_config.json":
                (work / name).write_bytes(data)
        check_quantized(work)
    difference = torch.cat([(b - a).abs() for b, a in zip(before, after, strict=True)])
    return {"mean": float(difference.mean()), "max": float(difference.max()), "tokens": float(len(difference))}


def check_quantized(folder: Path) -> int:
    """Read a quantised folder again.

    Returns:
        how many tensors are float8.

    Raises:
        ModelError: it has no float8 weight, a float8 weight without a scale, or a quantised router or head.
    """
    from megatron_fr.bridge.folder import WeightFiles

    files = WeightFiles(folder)
    eight = {name for name in files.names if files.spec(name).dtype == torch.float8_e4m3fn}
    files.close()
    if not eight:
        raise ModelError(f"{folder}: nothing was quantised; has the model layers that ModelOpt knows?")
    for name in sorted(eight):
        if f"{name}_scale" not in files.names:
            raise ModelError(f"{files.file(name)}: tensor {name!r} is float8 and has no scale")
        if name.endswith(("mlp.gate.weight", "lm_head.weight", "embed_tokens.weight")):
            raise ModelError(f"{files.file(name)}: tensor {name!r} must not be quantised")
    return len(eight)


def _logprobs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    ids = ids.to(model.device)
    logits = model(ids).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
