"""SGLang on a CPU without patching SGLang: a platform plugin and hooks, found through entry points.

They do nothing unless ``SGLANG_PLATFORM=megatron_fr_cpu`` selects them and torch sees no GPU.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import psutil

from megatron_fr.runtime.device import hide_gpu_packages

#: The entry point's name, and the value of ``SGLANG_PLATFORM`` that selects it.
PLATFORM_NAME = "megatron_fr_cpu"


def platform() -> str | None:
    """Dotted name of the platform class, or None where the plugin is not selected."""
    if not _selected():
        return None
    hide_gpu_packages()  # SGLang asks for its platform before it imports any of them
    return f"{__name__}.CpuPlatform"


def register_hooks() -> None:
    """Let the host buffer of routed experts work without CUDA, and let servers start faster."""
    if not _selected():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
    HookRegistry.register(target, _leave_unpinned, HookType.REPLACE)
    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _fork_children, HookType.AFTER)


def _selected() -> bool:
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return False
    import torch

    return not torch.cuda.is_available()


def _fork_children(result: None, *_: Any, **__: Any) -> None:
    """Fork scheduler and detokenizer from the server, so that they need not repeat its imports."""
    multiprocessing.set_start_method("fork", force=True)


def _leave_unpinned(buffer: Any, registration_granularity_bytes: int | None = None) -> None:
    """Do not pin: pinning only speeds up copies from a GPU."""


def __getattr__(name: str) -> Any:
    """Define the class when SGLang asks for it: other users of this module must not import SGLang, which is slow."""
    if name != "CpuPlatform":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

    class CpuPlatform(SRTPlatform):
        """Plain PyTorch kernels and torch-native attention."""

        _enum = PlatformEnum.OOT
        device_name = "cpu"
        device_type = "cpu"

        def get_dispatch_key_name(self) -> str:
            return "native"

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_device_total_memory(self, device_id: int = 0) -> int:
            return int(psutil.virtual_memory().total)

        def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
            memory = psutil.virtual_memory()
            return int(memory.available), int(memory.total)

        def get_current_memory_usage(self, device: Any = None) -> float:
            return float(psutil.Process().memory_info().rss)

    return CpuPlatform
