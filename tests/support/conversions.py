"""Conversions on ranks of their own, and what tests compare of folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron_fr import errors
from tests.support.parallel_launch import run_ranks


def convert_on_ranks(jobs: list[dict[str, Any]]) -> list[tuple[str, str] | None]:
    """On a rank: each job's conversion to Megatron; kind and words of its error, None where it succeeded."""
    from megatron_fr.convert.megatron import convert_hf_to_megatron

    answers: list[tuple[str, str] | None] = []
    for job in jobs:
        try:
            convert_hf_to_megatron(**job)
        except errors.MegatronFRError as error:
            answers.append((type(error).__name__, str(error)))
        else:
            answers.append(None)
    return answers


def to_megatron(source: str | Path, out: Path, *, ranks: int = 1, **options: Any) -> Path:
    """Convert on CPU ranks that a launcher started; raises what rank 0 raised."""
    job = {"hf_dir": source, "out_dir": out, **options}
    (error,) = run_ranks(convert_on_ranks, ranks, jobs=[job])[0]
    if error is not None:
        raise getattr(errors, error[0])(error[1])
    return out


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a Hugging Face folder."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_equal_folders(first: Path, second: Path) -> None:
    """The same tensors, bit by bit."""
    one, two = tensors(first), tensors(second)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype, name
        assert torch.equal(tensor, two[name]), name


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
