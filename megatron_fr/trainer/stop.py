"""How a run is asked to stop: SIGTERM or SIGINT to rank 0, and an exception on every rank."""

from __future__ import annotations

import signal
from typing import Any


class Shutdown(Exception):
    """Rank 0 was asked to stop; raised on every rank at the same place."""


class StopRequest:
    """True once SIGTERM or SIGINT arrived. Only rank 0's counts; the others learn it in a collective."""

    _asked = False

    def __init__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def __bool__(self) -> bool:
        return self._asked

    def _ask(self, *_: Any) -> None:
        self._asked = True
