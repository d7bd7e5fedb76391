"""FP8 export of a Hugging Face folder with NVIDIA ModelOpt."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_fr.convert.quantized import check_quantized
from megatron_fr.errors import ModelError, needs_extra
from megatron_fr.hf.atomic import atomic_folder
from megatron_fr.hf.folder import copy_other_files, read_spec, resolve_folder
from megatron_fr.hf.weights import SCALE_SUFFIX, WeightFiles, open_weights
from megatron_fr.runtime.device import prepare_process, resolve_device

#: Left in the model's own dtype: the head's errors are log-probability errors, and a changed router chooses others.
_LEFT_OUT = ("*lm_head*", "*mlp.gate.*")
#: The largest float8_e4m3fn; a scale is the largest absolute value over it.
_FP8_MAX = 448.0
#: ModelOpt works on the loop over experts and not on a grouped product.
_EXPERTS = "eager"


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
    open_weights(source, read_spec(source)).close()
    with atomic_folder(out_dir, source, overwrite=overwrite) as work:  # a target that is refused costs no calibration
        return _quantize_into(work, source, calibration)


@torch.no_grad()
def _quantize_into(work: Path, source: Path, calibration: Sequence[torch.Tensor]) -> dict[str, float]:
    prepare_process(resolve_device("auto"))  # ModelOpt imports Megatron-Core
    with needs_extra("quantize"):
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    held_out = list(calibration[1::2]) or list(calibration)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, experts_implementation=_EXPERTS).eval()
    before = [_logprobs(model, ids) for ids in held_out]

    def forward(quantized: Any) -> None:
        for ids in calibration[::2]:
            quantized(ids.to(quantized.device))

    config = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    for pattern in _LEFT_OUT:
        config["quant_cfg"].append({"quantizer_name": pattern, "enable": False})
    model = mtq.quantize(model, config, forward)
    export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=work)
    copy_other_files(source, work, but="config.json")  # the exporter's describes the quantisation
    del model
    again = load_quantized(work)
    after = [_logprobs(again, ids) for ids in held_out]
    difference = torch.cat([(b - a).abs() for b, a in zip(before, after, strict=True)])
    return {"mean": float(difference.mean()), "max": float(difference.max()), "tokens": float(len(difference))}


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
    import transformers

    with needs_extra("quantize"):
        import modelopt.torch.quantization as mtq
        from modelopt.torch.quantization.nn import TensorQuantizer

    folder = Path(folder)
    check_quantized(folder)
    with WeightFiles(folder) as files:
        scales = {name: files.tensor(name).float() for name in files.names if name.endswith(SCALE_SUFFIX)}
        tensors = {name: files.tensor(name).clone() for name in files.names - scales.keys()}
    for name, tensor in tensors.items():
        if f"{name}{SCALE_SUFFIX}" in scales:
            tensors[name] = (tensor.float() * scales[f"{name}{SCALE_SUFFIX}"]).bfloat16()
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
    logprobs: torch.Tensor = logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    return logprobs
