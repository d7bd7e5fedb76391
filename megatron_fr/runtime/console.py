"""What a person at the terminal sees of a process: text of any alphabet, and what a wait is for."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

_WAIT_S = 10.0


def print_any_text() -> None:
    """Print escapes for characters that the terminal's encoding lacks, instead of raising UnicodeEncodeError."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def say_what_is_awaited(
    what: Callable[[], str], every_s: float = _WAIT_S, stream: TextIO | None = None
) -> Iterator[None]:
    """Print ``what()`` and the time so far every ``every_s`` seconds within it; ``what`` is called in a thread.

    ``stream`` defaults to standard output.
    """
    done, started = threading.Event(), time.monotonic()

    def say() -> None:
        while not done.wait(every_s):
            text = what()
            if not done.is_set():
                print(f"waiting for {text}; {time.monotonic() - started:.0f} s so far", file=stream, flush=True)

    threading.Thread(target=say, daemon=True).start()
    try:
        yield
    finally:
        done.set()
