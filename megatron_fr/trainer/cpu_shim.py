"""Lets Megatron-Core train on a CPU, although it names CUDA in the places patched here.

:func:`install` changes ``torch.cuda`` and a few Megatron-Core functions for the whole process, but no arithmetic.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

_CPU = torch.device("cpu")
_installed = False


class _Inert:
    """Stands for a CUDA stream or event: every method does nothing and returns such an object."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Inert


def _nothing(*args: Any, **kwargs: Any) -> None:
    del args, kwargs


class _TorchOnCpu:
    """The torch module with factories that put ``device="cuda"`` on the CPU and pin no memory."""

    def __init__(self) -> None:
        for name in ("zeros", "ones", "empty", "tensor", "full"):
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        made: torch.Tensor = factory(*args, **kwargs)
        return made

    return make


def install() -> None:
    """Patch this process; a second call does nothing.

    Raises:
        RuntimeError: torch sees a GPU, which these patches would hide.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_available():
        raise RuntimeError("the CPU shim must not be installed where torch sees a GPU")
    _patch_torch_cuda()
    _patch_megatron()
    _installed = True


def _patch_torch_cuda() -> None:
    cuda: Any = torch.cuda
    stream = _Inert()

    @contextlib.contextmanager
    def on_stream(*args: Any) -> Iterator[None]:
        del args
        yield

    # Used by rotary embedding, router, gradient buffers and pipeline messages.
    cuda.current_device = lambda: _CPU
    cuda.synchronize = _nothing
    # Side streams of token dispatcher and gradient buffers.
    cuda.Stream = cuda.Event = _Inert
    cuda.current_stream = lambda *_: stream
    cuda.stream = on_stream
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


_OPTIMIZER = "megatron.core.optimizer"


def _patch_megatron() -> None:
    import megatron.core.models.common.embeddings.rope_utils
    import megatron.core.optimizer
    import megatron.core.optimizer.clip_grads
    import megatron.core.optimizer.optimizer
    import megatron.core.pipeline_parallel.schedules
    import megatron.core.tensor_parallel.random as mcore_random
    import megatron.core.transformer.moe.moe_utils
    import megatron.core.transformer.moe.token_dispatcher
    import megatron.core.transformer.utils
    import megatron.core.utils

    def set_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        del device, graph_safe
        torch.set_rng_state(new_state)

    mcore_random._set_cuda_rng_state = set_rng_state

    on_cpu: Any = _TorchOnCpu()  # literal device="cuda" or pinned memory in these modules
    for module in (
        megatron.core.models.common.embeddings.rope_utils,
        megatron.core.pipeline_parallel.schedules,
        megatron.core.optimizer.clip_grads,
        megatron.core.optimizer.optimizer,
        megatron.core.transformer.utils,
        megatron.core.utils,
    ):
        module.torch = on_cpu

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        del record_stream
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    # The original converts only CUDA tensors to numpy, and all-to-all needs its split sizes as numpy.
    for module in (megatron.core.transformer.moe.moe_utils, megatron.core.transformer.moe.token_dispatcher):
        module.maybe_move_tensor_to_cpu = to_host
