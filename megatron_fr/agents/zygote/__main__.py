"""Start the zygote: ``python -I <this folder> <descriptor of a socket>``.

Frames in both directions are a 4-byte big-endian length and JSON. The first frame configures the process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

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
    isolation.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    held: set[str] = set()
    if settings["isolate"]:
        held = isolation.enter_namespaces()
        if "processes" in held and (first := os.fork()):  # only a child is inside the new namespace
            channel.close()
            _, status = os.waitpid(first, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        isolation.die_with_parent()
    else:
        sys.path[:] = settings["sys_path"]
    loop.Zygote(channel, settings, held).serve()


def _read(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = channel.recv(size - len(data))
        if not chunk:
            os._exit(0)  # the other side left before it said anything
        data += chunk
    return data


main()
