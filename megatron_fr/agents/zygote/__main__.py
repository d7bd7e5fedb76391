"""Start the zygote: ``python -I <this folder> <descriptor of a socket>``.

Frames in both directions are a 4-byte big-endian length and JSON. The first frame configures the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
from typing import NoReturn

FOLDER = sys.path.pop(0)  # put there by the interpreter; what runs later must not import from it
sys.path.insert(0, FOLDER)
import isolation  # noqa: E402
import loop  # noqa: E402

sys.path.remove(FOLDER)
for name in ("isolation", "jobs", "loop"):  # a reward function may import modules of these names
    del sys.modules[name]


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    size = int.from_bytes(_read(channel, 4), "big")
    settings = json.loads(_read(channel, size))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    held: set[str] = isolation.enter_namespaces() if settings["isolate"] else set()
    if zygote := os.fork():  # a new process namespace begins with the next child
        channel.close()
        _guard(zygote, settings["scratch"])
    if not settings["isolate"]:
        sys.path[:] = settings["sys_path"]
    isolation.die_with_parent(signal.SIGKILL)
    loop.Zygote(channel, settings, held).serve()


def _guard(zygote: int, scratch: str) -> NoReturn:
    """Outlive the zygote, which may be killed: end what its calls left running, and remove its folder."""

    def end(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself, as it does when its socket closes
            os.kill(zygote, signal.SIGKILL)

    isolation.adopt_orphans()
    signal.signal(signal.SIGTERM, end)
    isolation.die_with_parent(signal.SIGTERM)
    while os.waitpid(-1, 0)[0] != zygote:
        continue  # an orphan that ended by itself
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the number may soon be another process's
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            for child in _children():
                os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


def _children() -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(name))
    return found


def _read(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = channel.recv(size - len(data))
        if not chunk:
            os._exit(0)  # the other side left before it said anything
        data += chunk
    return data


main()
