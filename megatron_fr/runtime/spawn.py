"""Runs a command that dies with its parent: ``python spawn.py PARENT_PID COMMAND...``.

The kernel keeps the parent-death signal across ``exec``. A program of its own cannot deadlock, unlike code between fork
and exec of a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def tied_to_us(command: Sequence[str]) -> list[str]:
    """Command line that runs ``command`` and lets the kernel kill it when this process ends."""
    return [sys.executable, __file__, str(os.getpid()), *command]


def main(argv: list[str]) -> None:
    """Replace this process by the command; exit with 1 when the parent is gone."""
    parent, command = int(argv[0]), argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before the call above
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
