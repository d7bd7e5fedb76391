"""Folders of float8 weights in ModelOpt's format: a weight ``W`` comes with ``W_scale`` and an input scale."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_fr.errors import ModelError
from megatron_fr.hf.weights import SCALE_SUFFIX, WeightFiles


def check_quantized(folder: Path) -> int:
    """Check that every float8 weight has its scale, and that router, head and embedding are not quantised.

    Returns:
        number of float8 tensors.

    Raises:
        ModelError: names the tensor, or the folder that has no float8 weight.
    """
    with WeightFiles(folder) as files:
        eight = [name for name in sorted(files.names) if files.tensor(name).dtype == torch.float8_e4m3fn]
        for name in eight:
            if f"{name}{SCALE_SUFFIX}" not in files.names:
                raise ModelError(f"{files.file(name)}: tensor {name!r} is float8 and has no scale")
            if name.endswith(("mlp.gate.weight", "lm_head.weight", "embed_tokens.weight")):
                raise ModelError(f"{files.file(name)}: tensor {name!r} must not be quantised")
    if not eight:
        raise ModelError(f"{folder}: nothing was quantised; has the model layers that ModelOpt knows?")
    return len(eight)
