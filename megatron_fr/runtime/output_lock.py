"""Locks of a run's output folder, each with a readable line that says who holds it."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import time
from pathlib import Path
from typing import IO

from megatron_fr.errors import MegatronFRError


def lock_output(output: Path, name: str) -> IO[str] | None:
    """Lock ``output/NAME.lock`` until the file is closed or the process ends; None on a file system without locks.

    Raises:
        MegatronFRError: another process holds the lock, or ``output`` cannot be written.
    """
    path = output / f"{name}.lock"
    try:
        output.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise unwritable_output(output, error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        with file:
            file.seek(0)
            holder = file.readline().strip() or "another process"
        raise MegatronFRError(
            f"output={str(output)!r} is in use by {holder} ({path}); wait for its end or stop it, or give each run its "
            "own output"
        ) from error
    except OSError:
        file.close()
        return None
    try:
        file.truncate(0)
        command = " ".join(sys.argv)[:200]
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T')}: {command}\n")
        file.flush()
    except OSError as error:
        raise unwritable_output(output, error) from error
    return file


def unwritable_output(output: Path, error: OSError) -> MegatronFRError:
    """Make the error of an output folder that cannot be written."""
    return MegatronFRError(f"output={str(output)!r}: {error.strerror}; free space or choose another folder")
