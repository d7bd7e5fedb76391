"""What a conversion prints, and the exit status of its tool."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_fr.errors import MegatronFRError


def report(convert: Callable[[], Path], *, verified: bool) -> int:
    """Call a conversion and print where its result is, or its error; return the exit status."""
    started = time.monotonic()
    try:
        out = convert()
    except MegatronFRError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if os.environ.get("RANK", "0") == "0":
        size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
        note = ", verified" if verified else ""
        print(f"{out}: {size / 1e9:.3f} GB in {time.monotonic() - started:.1f} s{note}")
    return 0
