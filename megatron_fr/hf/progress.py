"""One line of progress on a terminal: what was written, how much, how fast."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from megatron_fr.errors import MegatronFRError


class Meter:
    """Called with a name and a number of bytes; writes to stderr where that is a terminal."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._shown = 0.0
        self._count = 0
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print(file=sys.stderr)

    def __call__(self, name: str, num_bytes: int) -> None:
        self._count += 1
        self._bytes += num_bytes
        now = time.monotonic()
        if sys.stderr.isatty() and now - self._shown > 0.1:
            self._shown = now
            print(f"\r{self.summary()}  {name[-60:]:60}", end="", file=sys.stderr, flush=True)

    def summary(self) -> str:
        """Counts, bytes and rate so far."""
        seconds = max(1e-9, time.monotonic() - self._started)
        return f"{self._count} items, {self._bytes / 1e9:.3f} GB in {seconds:.1f} s"


def report(convert: Callable[[Meter], Path], note: str = "") -> int:
    """Call a conversion, print where its result is and ``note``, or the error; return the exit status."""
    # A checkpoint of many ranks has many files, and each thread opens those that it reads.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        with Meter() as meter:
            out = convert(meter)
    except MegatronFRError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(f"{out}: {meter.summary()}{note}")
    return 0
