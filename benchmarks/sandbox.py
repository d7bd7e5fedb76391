#!/usr/bin/env python3
"""Calls of the Python tool a second; the last line is JSON.

Three ways run ``print(1)``: the sandbox with its warm interpreter, a plain ``python -I`` a call, and a ``bwrap`` with a
``python -I`` a call. Each runs with 1, 64 and 500 calls at once. ``event_loop_delay_ms`` is the longest delay of the
loop that sends the sandbox's calls. All share the machine with whatever else runs on it; look at ``load`` beforehand.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

from megatron_fr.config import ToolLimits
from megatron_fr.sandbox import Sandbox, root

_AT_ONCE = (1, 64, 500)
_CODE = "print(1)"


async def main(quick: bool) -> None:
    figures: dict[str, object] = {"benchmark": "sandbox", "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    sandbox = Sandbox(ToolLimits(timeout_s=60))
    started = time.perf_counter()
    await sandbox.start()
    figures["start_s"] = time.perf_counter() - started

    async def warm() -> None:
        result = await sandbox.run_code(_CODE)
        assert result.output == "1\n", result

    plain = [os.path.realpath(sys.executable), "-I", "-c", _CODE]
    cold = root.command([], 0)
    cold = [*cold[: cold.index("--") + 1], *plain]
    ways: dict[str, Callable[[], Awaitable[None]]] = {
        "sandbox": warm,
        "python": lambda: _spawn(plain),
        "bwrap": lambda: _spawn(cold),
    }
    try:
        for at_once in _AT_ONCE:
            for name, way in ways.items():
                rate, seconds, delay = await _measure(way, at_once, budget_s=1.5 if quick else 8)
                figures[f"{name}_calls_per_s_{at_once}"] = rate
                figures[f"{name}_median_ms_{at_once}"] = seconds * 1e3
                if name == "sandbox":
                    figures[f"event_loop_delay_ms_{at_once}"] = delay * 1e3
                print(
                    f"{at_once:>4} at once, {name:<8} {rate:7.0f} calls/s, {seconds * 1e3:7.1f} ms a call", flush=True
                )
    finally:
        await sandbox.stop()
    print(json.dumps(figures))


async def _measure(way: Callable[[], Awaitable[None]], at_once: int, budget_s: float) -> tuple[float, float, float]:
    """Calls a second, median seconds of one, and the loop's longest delay; no call starts after ``budget_s``."""
    await asyncio.gather(*(way() for _ in range(min(at_once, 8))))
    end, taken, worst = time.perf_counter() + budget_s, list[float](), 0.0

    async def work() -> None:
        while (started := time.perf_counter()) < end:
            await way()
            taken.append(time.perf_counter() - started)

    async def watch() -> None:
        nonlocal worst
        while True:
            started = time.perf_counter()
            await asyncio.sleep(0.001)
            worst = max(worst, time.perf_counter() - started - 0.001)

    watcher = asyncio.create_task(watch())
    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(at_once)))
    rate = len(taken) / (time.perf_counter() - started)
    watcher.cancel()
    return rate, statistics.median(taken), worst


async def _spawn(command: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env={})
    output, _ = await process.communicate()
    assert output == b"1\n", output


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under 40 s")
    asyncio.run(main(parser.parse_args().quick))
