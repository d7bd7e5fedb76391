"""Folders of float8 weights in ModelOpt's format: a weight ``W`` comes with ``W_scale`` and an input scale."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_fr.errors import ModelError
from megatron_fr.hf.folder import WeightFiles

#: Ends the names of the tensors that such a folder has besides the model's.
SCALE_SUFFIX = "_scale"


def check_quantized(folder: Path) -> int:
    """Read a quantised folder again.

    Returns:
        how many tensors are float8.

    Raises:
        ModelError: it has no float8 weight, a float8 weight without a scale, or a quantised router or head.
    """
    files = WeightFiles(folder)
    eight = {name for name in files.names if files.spec(name).dtype == torch.float8_e4m3fn}
    files.close()
    if not eight:
        raise ModelError(f"{folder}: nothing was quantised; has the model layers that ModelOpt knows?")
    for name in sorted(eight):
        if f"{name}{SCALE_SUFFIX}" not in files.names:
            raise ModelError(f"{files.file(name)}: tensor {name!r} is float8 and has no scale")
        if name.endswith(("mlp.gate.weight", "lm_head.weight", "embed_tokens.weight")):
            raise ModelError(f"{files.file(name)}: tensor {name!r} must not be quantised")
    return len(eight)
