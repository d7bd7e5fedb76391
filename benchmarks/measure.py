"""Time and peak memory of small pieces of work on a shared machine."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Sample:
    """Repetitions of one variant: seconds and peak bytes beyond what was held before it ran."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def median_peak(self) -> float:
        return statistics.median(self.peak_bytes)


def interleave(
    variants: Mapping[str, Callable[[], Any]], repetitions: int, budget_s: float = float("inf")
) -> dict[str, Sample]:
    """Run the variants in turn, ``repetitions`` rounds of them after one that warms up.

    In turn, since other work on the machine then disturbs all of them alike; read medians. No further round starts
    once ``budget_s`` seconds are over, but there is always one.
    """
    started = time.monotonic()
    samples = {name: Sample() for name in variants}
    gc.collect()
    gc.freeze()  # else every measurement's collection looks through all that the imports made
    try:
        for round_number in range(repetitions + 1):
            if round_number > 1 and time.monotonic() - started > budget_s:
                break
            for name, work in variants.items():
                seconds, peak = measure(work)
                if round_number:
                    samples[name].seconds.append(seconds)
                    samples[name].peak_bytes.append(peak)
    finally:
        gc.unfreeze()
    return samples


def measure(work: Callable[[], Any]) -> tuple[float, int]:
    """Seconds and peak bytes of one call.

    With one thread on a CPU the seconds are the process's processor time, which on an idle machine is the wall time and
    on a busy one leaves out what others took; otherwise they are wall time.

    On a CPU the peak is the kernel's own: the high-water mark of resident memory is reset before the call and read
    after it (all allocators and scratch inside kernels count; the resolution is a few hundred KiB). With a GPU it is
    torch's allocator's.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - started, torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)  # what free() kept would hide the next allocation
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    work()
    seconds = clock() - started
    return seconds, max(0, _status_bytes("VmHWM") - before)


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}; peak memory on a CPU needs Linux")
