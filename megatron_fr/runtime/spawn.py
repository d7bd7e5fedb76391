"""Runs a command that dies with its parent: ``python spawn.py PARENT_PID COMMAND...``.

The kernel keeps the death signal across ``exec``. Code between fork and exec could deadlock a process with threads.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def tied_to_us(command: Sequence[str]) -> list[str]:
    """Make the command line that runs ``command`` and lets the kernel kill it when this process ends."""
    return [sys.executable, __file__, str(os.getpid()), *command]


if __name__ == "__main__":
    parent, *program = sys.argv[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):  # it died before the call above
        sys.exit(1)
    os.execvp(program[0], program)
