"""FP8 export of a Hugging Face folder with NVIDIA ModelOpt, calibrated on recorded trajectories.

A run records trajectories in its training checkpoints: ``rollout.state`` holds those that are finished and wait for
their update. They are the policy's own text, sampled a version or two before the checkpoint at most, with prompts and
tool output in between. How many wait in one checkpoint is chance (none, where the engines were the slower part), so a
run's folder gives those of all its checkpoints.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from megatron_fr.checkpoint.store import FOLDER, ROLLOUT_FILE, all_checkpoints
from megatron_fr.errors import CheckpointError, ModelError, TrajectoryError
from megatron_fr.hf.atomic import atomic_folder
from megatron_fr.hf.folder import WeightFiles, copy_other_files, read_hf_config, resolve_folder
from megatron_fr.hf.load import check_files
from megatron_fr.hf.quantized import check_quantized
from megatron_fr.rollout.state import read_state
from megatron_fr.runtime.device import prepare_process, resolve_device
from megatron_fr.trajectory import Trajectory, decode

#: Left in the model's own dtype: the head's errors are log-probability errors, and a changed router chooses others.
_LEFT_OUT = ("*lm_head*", "*mlp.gate.*")
#: The largest float8_e4m3fn; a scale is the largest absolute value over it.
_FP8_MAX = 448.0
#: ModelOpt works on the loop over experts and not on a grouped product.
_EXPERTS = "eager"


def read_calibration(path: str | Path, folder: str | Path, *, limit: int = 64, max_tokens: int = 4096) -> list[Any]:
    """Token ids of recorded trajectories, or of JSONL with ``tokens`` or ``prompt`` in each line.

    Args:
        path: a run's output folder or the ``training_state`` in it (the training checkpoints, newest first, until there
            are ``limit``; one that cannot be read is skipped with a message, as a run does), one training checkpoint
            (its folder or its ``rollout.state``), an archive of trajectories (npz), or JSONL.
        folder: of the model, for its tokenizer.

    Returns:
        int64 tensors ``[1, tokens]``, at most ``limit``.

    Raises:
        ModelError: it is nothing of these, or holds no trajectory; a trajectory or line, which is named, has a token
            that the model's vocabulary lacks; or a line is no such object.
    """
    path = Path(path)
    vocabulary = int(read_hf_config(folder).vocab_size)
    if (path / ROLLOUT_FILE).exists():
        path = path / ROLLOUT_FILE
    try:
        if path.is_dir():
            rows = _of_run(path, limit)
        elif path.name == ROLLOUT_FILE:
            rows = _tokens(path, _waiting(path))
        elif path.suffix == ".npz":
            rows = _tokens(path, decode(path.read_bytes()))
        else:
            rows = _read_lines(path, folder)
    except (CheckpointError, TrajectoryError, OSError, UnicodeDecodeError) as error:
        raise ModelError(f"calibration {path} cannot be read: {error}") from error
    for place, row in rows:
        if (unknown := next((token for token in row if not 0 <= token < vocabulary), None)) is not None:
            raise ModelError(
                f"{place}: holds token {unknown}, expected ids of 0 to {vocabulary - 1}; give what was tokenized with "
                f"the tokenizer of {folder}"
            )
    kept = [torch.tensor([row[:max_tokens]], dtype=torch.int64) for _, row in rows if len(row) > 1][:limit]
    if not kept:
        raise ModelError(
            f"calibration {path} holds no sequence of two or more tokens; give the output folder of a run with "
            "rollout.max_policy_lag above 0 (in a synchronous run's checkpoints no trajectory waits, in another's by "
            "chance; in one of several usually some do), or JSONL"
        )
    return kept


def _of_run(path: Path, limit: int) -> list[tuple[str, list[int]]]:
    """Of a run's checkpoints, newest first until there are ``limit``."""
    checkpoints = all_checkpoints(path.parent if path.name == FOLDER else path)
    if not checkpoints:
        raise ModelError(
            f"calibration {path}: neither a training checkpoint ({ROLLOUT_FILE}) nor a run's output folder with "
            f"some ({FOLDER}/update-N); give one of them, or JSONL"
        )
    rows: dict[str, tuple[str, list[int]]] = {}  # by id: one may wait in more than one checkpoint
    failure = None
    for checkpoint in checkpoints:
        if len(rows) >= limit:
            break
        file = checkpoint / ROLLOUT_FILE
        try:
            waiting = [t for t in _waiting(file) if t.id not in rows]
        except (CheckpointError, TrajectoryError, OSError) as error:  # damaged, or deleted by the run meanwhile
            failure = error
            print(f"{checkpoint} is skipped: {error}", file=sys.stderr, flush=True)
            continue
        rows |= zip([t.id for t in waiting], _tokens(file, waiting), strict=True)
    if failure is not None and not rows:
        raise failure
    return list(rows.values())


def _waiting(file: Path) -> list[Trajectory]:
    state = read_state(file)
    return [*state.ready, *state.partial]


def _tokens(path: Path, trajectories: Iterable[Trajectory]) -> list[tuple[str, list[int]]]:
    return [(f"{path}, trajectory {t.id!r}", t.tokens.tolist()) for t in trajectories]


def _read_lines(path: Path, folder: str | Path) -> list[tuple[str, list[int]]]:
    """The place and the tokens of each line of a JSONL file."""

    @functools.cache
    def tokenizer() -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder)

    lines = enumerate(path.read_text().splitlines(), 1)
    return [(f"{path}:{i}", _read_line(f"{path}:{i}", line, tokenizer)) for i, line in lines if line.strip()]


def _read_line(place: str, line: str, tokenizer: Callable[[], Any]) -> list[int]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ModelError(f"{place}: no JSON: {error}; write one object a line") from error
    if not isinstance(row, dict):
        raise ModelError(f'{place}: holds {type(row).__name__}; write an object, {{"tokens": [ids]}}')
    if isinstance(row.get("tokens"), list):
        for token in row["tokens"]:
            if type(token) is not int:  # a bool is an int
                raise ModelError(f"{place}: tokens holds {token!r}, expected ids, or give 'prompt' (text)")
        return list(row["tokens"])
    if isinstance(row.get("prompt"), str):
        return list(tokenizer()(row["prompt"])["input_ids"])
    raise ModelError(f"{place}: neither 'tokens' (ids) nor 'prompt' (text); give one of them")


def quantize_hf(
    hf_dir: str | Path, out_dir: str | Path, calibration: Sequence[torch.Tensor], *, overwrite: bool = False
) -> dict[str, float]:
    """Write ``out_dir`` with FP8 weights and scales, load it again from the disk, and compare its log-probabilities
    with those of ``hf_dir`` in bfloat16. The folder gets its name once all of that has worked.

    Args:
        calibration: int64 ``[1, tokens]`` each, whose activations set the scales; half of them, the odd ones, are
            kept out where there are two or more, and compared.
        overwrite: replace a model or checkpoint in ``out_dir`` with all that it holds.

    Returns:
        ``mean`` and ``max`` of the absolute difference of next-token log-probabilities, in nats; ``tokens`` compared.

    Raises:
        ModelError: the model cannot be loaded, or the written folder cannot be written or read back; names the file.
    """
    source = resolve_folder(hf_dir)
    hf_config = read_hf_config(source)
    files = WeightFiles(source)
    check_files(files, hf_config)
    files.close()
    with atomic_folder(out_dir, source, overwrite=overwrite) as work:  # a target that is refused costs no calibration
        return _quantize_into(work, source, calibration)


@torch.no_grad()
def _quantize_into(work: Path, source: Path, calibration: Sequence[torch.Tensor]) -> dict[str, float]:
    prepare_process(resolve_device("auto"))  # ModelOpt imports Megatron-Core
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    held_out = list(calibration[1::2]) or list(calibration)
    with _named(source, "read"):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, experts_implementation=_EXPERTS)
    model = model.eval()
    before = [_logprobs(model, ids) for ids in held_out]

    def forward(quantized: Any) -> None:
        for ids in calibration[::2]:
            quantized(ids.to(quantized.device))

    config = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    for pattern in _LEFT_OUT:
        config["quant_cfg"].append({"quantizer_name": pattern, "enable": False})
    model = mtq.quantize(model, config, forward)
    with _named(work, "written"):
        export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=work)
        written = {file.name: file.read_bytes() for file in work.glob("*.json")}
        copy_other_files(source, work)
        for name, data in written.items():  # the exporter's configuration describes the quantisation
            if name.endswith("config.json") and name != "generation_config.json":
                (work / name).write_bytes(data)
    del model
    with _named(work, "read back"):
        again = load_quantized(work)
    after = [_logprobs(again, ids) for ids in held_out]
    difference = torch.cat([(b - a).abs() for b, a in zip(before, after, strict=True)])
    return {"mean": float(difference.mean()), "max": float(difference.max()), "tokens": float(len(difference))}


@contextmanager
def _named(folder: Path, done: str) -> Iterator[None]:
    """Errors of the libraries that read and write a folder, as one that names the file as well as can be told."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        path = folder
        if isinstance(error, SafetensorError):  # names no file, and deletes the one that it was writing
            path = folder / "*.safetensors"
        elif error.filename is not None:
            path = Path(error.filename)
        elif done == "written":  # the last that was begun
            path = max(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns, default=folder)
        raise ModelError(f"{path} cannot be {done}: {getattr(error, 'strerror', None) or error}") from error


@torch.no_grad()
def load_quantized(folder: str | Path) -> Any:
    """A transformers model in bfloat16 that computes what a quantised folder says, from its files alone.

    transformers itself does not know ModelOpt's format: it would load the float8 numbers without their scales. So the
    weights are multiplied with their scales here, and ModelOpt's quantisers round the inputs of each quantised layer
    by the scales in the files, as an engine's FP8 kernels do. A simulation: products are bfloat16's.

    Raises:
        ModelError: a scale is missing, or tensors and configuration do not match.
    """
    prepare_process(resolve_device("auto"))
    import modelopt.torch.quantization as mtq
    import transformers
    from modelopt.torch.quantization.nn import TensorQuantizer
    from safetensors.torch import load_file

    folder = Path(folder)
    check_quantized(folder)
    files = WeightFiles(folder)
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted({files.file(name) for name in files.names}):
        tensors |= load_file(path)
    files.close()
    scales = {name: tensors.pop(name).float() for name in list(tensors) if name.endswith("_scale")}
    for name, tensor in tensors.items():
        if f"{name}_scale" in scales:
            tensors[name] = (tensor.float() * scales[f"{name}_scale"]).bfloat16()
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    architecture: Any = getattr(transformers, config.architectures[0])
    model, info = architecture.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=torch.bfloat16,
        experts_implementation=_EXPERTS,
        output_loading_info=True,
    )
    if wrong := sorted({*info["missing_keys"], *info["unexpected_keys"]}):
        raise ModelError(f"{folder}: tensor {wrong[0]!r} is missing, or config.json describes no such tensor")
    inputs = [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*input_quantizer", "cfg": {"num_bits": (4, 3), "axis": None}},
        *({"quantizer_name": pattern, "enable": False} for pattern in _LEFT_OUT),
    ]
    model = mtq.quantize(model.eval(), {"quant_cfg": inputs, "algorithm": None})
    for name, module in model.named_modules():
        if isinstance(module, TensorQuantizer) and module.is_enabled:
            module.amax = _input_scale(folder, name, scales) * _FP8_MAX
    return model


def _input_scale(folder: Path, quantizer: str, scales: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Experts share one quantiser of their inputs, and gate and up are one product in transformers."""
    name = quantizer.replace("gate_up_proj_input_quantizer", "0.gate_proj.input_scale")
    name = name.replace("down_proj_input_quantizer", "0.down_proj.input_scale").replace(
        "input_quantizer", "input_scale"
    )
    if name not in scales:
        raise ModelError(f"{folder}: the input of a quantised layer has no scale {name!r}; calibrate with more tokens")
    return scales[name]


def _logprobs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    ids = ids.to(model.device)
    logits = model(ids).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
