"""FP8 export of a Hugging Face folder with NVIDIA ModelOpt: each weight ``W`` has a ``W_scale`` and an input scale."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_fr.convert.inspect import check_quantized
from megatron_fr.errors import ModelError, needs_extra
from megatron_fr.hf.atomic import atomic_folder
from megatron_fr.hf.folder import copy_other_files, read_spec, resolve_folder
from megatron_fr.hf.weights import SCALE_SUFFIX, WeightFiles, open_weights
from megatron_fr.runtime.device import prepare_process, resolve_device

#: Left in the model's own dtype: the head's errors are log-probability errors, and a changed router chooses others.
_LEFT_OUT = [{"quantizer_name": pattern, "enable": False} for pattern in ("*lm_head*", "*mlp.gate.*")]
#: The largest float8_e4m3fn; a scale is the largest absolute value over it.
_FP8_MAX = 448.0
#: ModelOpt works on the loop over experts and not on a grouped product.
_OPTIONS: dict[str, Any] = {"dtype": torch.bfloat16, "experts_implementation": "eager"}


@torch.no_grad()
def quantize_hf(
    hf_dir: str | Path, out_dir: str | Path, calibration: Sequence[torch.Tensor], *, overwrite: bool = False
) -> dict[str, float]:
    """Write ``out_dir`` with FP8 weights and scales, load it again, and compare its log-probabilities with bfloat16's.

    The folder gets its name once all of that has worked.

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
    open_weights(source, read_spec(source))
    held_out = list(calibration[1::2]) or list(calibration)

    def forward(quantized: Any) -> None:
        for ids in calibration[::2]:
            quantized(ids.to(quantized.device))

    with atomic_folder(out_dir, source, overwrite=overwrite) as work:  # a target that is refused costs no calibration
        prepare_process(resolve_device("auto"))  # ModelOpt imports Megatron-Core
        with needs_extra("quantize"):
            import modelopt.torch.quantization as mtq
            from modelopt.torch.export import export_hf_checkpoint
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(source, **_OPTIONS).eval()
        before = [_logprobs(model, ids) for ids in held_out]
        config = mtq.FP8_DEFAULT_CFG | {"quant_cfg": [*mtq.FP8_DEFAULT_CFG["quant_cfg"], *_LEFT_OUT]}
        model = mtq.quantize(model, config, forward)
        export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=work)
        described = (work / "config.json").read_bytes()  # with the quantisation
        copy_other_files(source, work)
        (work / "config.json").write_bytes(described)
        del model
        again = load_quantized(work)
        after = [_logprobs(again, ids) for ids in held_out]
    difference = torch.cat([(a - b).abs() for a, b in zip(after, before, strict=True)])
    return {"mean": float(difference.mean()), "max": float(difference.max()), "tokens": float(len(difference))}


@torch.no_grad()
def load_quantized(folder: str | Path) -> Any:
    """A transformers model in bfloat16 that computes what a quantised folder says, from its files alone.

    transformers would load float8 numbers without their scales. So they are multiplied here, and ModelOpt's quantisers
    round the inputs of each layer by the scales in the files, as an engine's FP8 kernels do; products are bfloat16's.

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
    files = WeightFiles(folder)
    scales = {name: files.tensor(name).float() for name in files.names if name.endswith(SCALE_SUFFIX)}
    tensors = {name: files.tensor(name).clone() for name in files.names - scales.keys()}
    for name in tensors:
        if (scale := scales.get(f"{name}{SCALE_SUFFIX}")) is not None:
            tensors[name] = (tensors[name].float() * scale).bfloat16()
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    architecture: Any = getattr(transformers, config.architectures[0])
    model, info = architecture.from_pretrained(
        None, config=config, state_dict=tensors, output_loading_info=True, **_OPTIONS
    )
    if wrong := sorted({*info["missing_keys"], *info["unexpected_keys"]}):
        raise ModelError(f"{folder}: tensor {wrong[0]!r} is missing, or config.json describes no such tensor")
    inputs = [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*input_quantizer", "cfg": {"num_bits": (4, 3), "axis": None}},
        *_LEFT_OUT,
    ]
    model = mtq.quantize(model.eval(), {"quant_cfg": inputs, "algorithm": None})
    for name, module in model.named_modules():
        if isinstance(module, TensorQuantizer) and module.is_enabled:
            module.amax = _input_scale(folder, name, scales) * _FP8_MAX
    return model


def _input_scale(folder: Path, quantizer: str, scales: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Experts share one quantiser of their inputs, and gate and up are one product in transformers."""
    name = quantizer.replace("gate_up_proj_input_", "0.gate_proj.input_")
    name = name.replace("down_proj_input_", "0.down_proj.input_").replace("input_quantizer", "input_scale")
    if name not in scales:
        raise ModelError(f"{folder}: the input of a quantised layer has no scale {name!r}; calibrate with more tokens")
    return scales[name]


def _logprobs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    ids = ids.to(model.device)
    logits = model(ids).logits[0, :-1].float()
    logprobs: torch.Tensor = logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    return logprobs
