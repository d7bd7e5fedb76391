"""Says what holds rollouts up: what stuck trajectories wait for, and code that blocks the event loop."""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_TICK_S = 0.05
_BLOCKED_S = 1.0
_STUCK_S = 60.0
#: What a coroutine stands for, by its qualified name; any other is the agent's.
_PARTS = {
    "EngineSession.generate": "generation",
    "PythonToolAgent._answers": "tools",
    "RewardRunner.score": "the reward",
    "Semaphore.acquire": "its turn",
}
#: Code that is nobody's fault: the standard library, installed packages, this package.
_OTHERS = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib")), str(Path(__file__).parent.parent))


def waits_for(task: asyncio.Task[Any]) -> str:
    """Say what a suspended trajectory waits for: ``generation``, ``tools``, ``the reward``, or a line of the agent."""
    found: list[Any] = []
    waiting: Any = task.get_coro()
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        found.append(frame)
        waiting = waiting.cr_await
    for frame in found:
        if (part := _PARTS.get(frame.f_code.co_qualname)) is not None:
            return part
    own = [frame for frame in found if not frame.f_code.co_filename.startswith(_OTHERS)] or found
    return f"agent code at {own[-1].f_code.co_filename}:{own[-1].f_lineno}" if own else "nothing"


async def report_stuck(
    ended: Callable[[], int], waiting: Callable[[], Mapping[str, int]], what: str = "trajectory"
) -> None:
    """Log what trajectories under way wait for, whenever none has ended for a minute; never returns.

    Args:
        ended: number of trajectories that have ended, well or not.
        waiting: number of trajectories under way by what they wait for.
    """
    seen, since = ended(), time.monotonic()
    while True:
        await asyncio.sleep(_STUCK_S)
        if seen != (seen := ended()):
            since = time.monotonic()
        elif parts := waiting():
            said = ", ".join(f"{number} wait for {part}" for part, number in parts.items())
            log.warning("no %s has ended for %.0f s: %s", what, time.monotonic() - since, said)


class EventLoopDelay:
    """Measures how late the event loop runs its timers, and names the code that blocks it for over a second.

    Such code (a blocking call in an ``async`` agent or reward) holds up every trajectory.
    """

    def __init__(self) -> None:
        self._worst_s = 0.0
        self._beat = time.monotonic()

    async def run(self) -> None:
        """Sleep in short ticks and note by how much each was overslept; never returns."""
        self._beat = time.monotonic()
        done = threading.Event()
        threading.Thread(target=self._name_blocking_code, args=(threading.get_ident(), done), daemon=True).start()
        try:
            while True:
                await asyncio.sleep(_TICK_S)
                now = time.monotonic()
                self._worst_s = max(self._worst_s, now - self._beat - _TICK_S)
                self._beat = now
        finally:
            done.set()

    def take_worst_ms(self) -> float:
        """The worst delay since the last call, milliseconds."""
        worst, self._worst_s = self._worst_s, 0.0
        return 1000 * worst

    def _name_blocking_code(self, loop_thread: int, done: threading.Event) -> None:
        """Log each place once."""
        named: set[str] = set()
        while not done.wait(_BLOCKED_S / 4):
            frame = sys._current_frames().get(loop_thread)
            if frame is None or time.monotonic() - self._beat < _BLOCKED_S:
                continue
            stack = traceback.extract_stack(frame)
            line = next((f for f in reversed(stack) if not f.filename.startswith(_OTHERS)), stack[-1])
            if (place := f"{line.filename}:{line.lineno} in {line.name}") not in named:
                named.add(place)
                log.warning(
                    "the event loop is blocked at %s: nothing else can run meanwhile; await there, or use "
                    "asyncio.to_thread()",
                    place,
                )
