"""Lets Megatron-Core train on a CPU, although it names CUDA in the places patched here.

:func:`install` changes ``torch.cuda`` and a few Megatron-Core functions for the whole process, but no arithmetic.
"""

from __future__ import annotations

import contextlib
import sys
from functools import cache
from importlib import import_module
from typing import Any

import torch

_CPU = torch.device("cpu")
_OPTIMIZER = "megatron.core.optimizer"
#: Modules of Megatron-Core with a literal ``device="cuda"`` or pinned memory.
_NAMING_CUDA = (
    "models.common.embeddings.rope_utils",
    "optimizer.clip_grads",
    "optimizer.optimizer",
    "pipeline_parallel.schedules",
    "transformer.utils",
    "utils",
)


class _Inert:
    """Stands for a CUDA stream or event: every method does nothing and returns such an object."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Inert


class _TorchOnCpu:
    """The torch module with factories that put ``device="cuda"`` on the CPU and pin no memory."""

    def __init__(self) -> None:
        for name in ("zeros", "ones", "empty", "tensor", "full"):
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


@cache
def install() -> None:
    """Patch this process; a second call does nothing.

    Raises:
        RuntimeError: torch sees a GPU, which these patches would hide.
    """
    if torch.cuda.is_available():
        raise RuntimeError("the CPU shim must not be installed where torch sees a GPU")
    _patch_torch()
    _patch_megatron()


def _patch_torch() -> None:
    cuda: Any = torch.cuda
    stream = _Inert()
    # Used by rotary embedding, router, gradient buffers and pipeline messages.
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda *_, **__: None
    # Side streams of token dispatcher and gradient buffers.
    cuda.Stream = cuda.Event = _Inert
    cuda.current_stream = lambda *_: stream
    cuda.stream = lambda *_: contextlib.nullcontext()
    # The model-parallel RNG tracker keeps states of the generator that layers use: here the CPU's.
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.manual_seed = torch.manual_seed
    tensor: Any = torch.Tensor
    # Tied embeddings of pipeline stages are moved with .cuda().
    tensor.cuda = lambda self, *_, **__: self
    # Megatron's optimizers recognise parameters by the names of CUDA tensor types.
    plain_type = tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = plain_type(self, *args, **kwargs)
        if not args and not kwargs and sys._getframe(1).f_globals.get("__name__", "").startswith(_OPTIMIZER):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    tensor.type = type_


def _patch_megatron() -> None:
    random: Any = import_module("megatron.core.tensor_parallel.random")
    random._set_cuda_rng_state = lambda new_state, *_, **__: torch.set_rng_state(new_state)
    on_cpu = _TorchOnCpu()
    for name in _NAMING_CUDA:
        module: Any = import_module(f"megatron.core.{name}")
        module.torch = on_cpu

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        del record_stream
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    # The original converts only CUDA tensors to numpy, and all-to-all needs its split sizes as numpy.
    for name in ("moe_utils", "token_dispatcher"):
        module = import_module(f"megatron.core.transformer.moe.{name}")
        module.maybe_move_tensor_to_cpu = to_host
