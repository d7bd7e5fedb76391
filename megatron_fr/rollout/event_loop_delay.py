"""How late the event loop runs its timers: a loop blocked by a tool or a verifier shows here first."""

from __future__ import annotations

import asyncio
import time

_TICK_S = 0.05


class EventLoopDelay:
    """Measures while :meth:`run` is a running task."""

    def __init__(self) -> None:
        self._worst_s = 0.0

    async def run(self) -> None:
        """Sleep in short ticks and note by how much each was overslept; never returns."""
        while True:
            started = time.monotonic()
            await asyncio.sleep(_TICK_S)
            self._worst_s = max(self._worst_s, time.monotonic() - started - _TICK_S)

    def take_worst_ms(self) -> float:
        """The worst delay since the last call, milliseconds."""
        worst, self._worst_s = self._worst_s, 0.0
        return 1000 * worst
