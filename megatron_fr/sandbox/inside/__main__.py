"""Start the warm interpreter: ``python -I -S <this folder> <descriptor of a SOCK_SEQPACKET socket>``.

Its first packet is the settings. Each further one is a call: limits in JSON, and three descriptors (code, output,
status). It only forks: code and output never pass through its memory, which every later call inherits.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
from typing import NoReturn

import call  # beside this file
import namespaces  # beside this file

sys.path.pop(0)  # this folder, of which code must not import
for _name in ("call", "namespaces", "seccomp"):
    del sys.modules[_name]


def main(channel: socket.socket) -> NoReturn:
    settings = json.loads(channel.recv(1 << 16))
    os.environ.clear()
    os.environ.update(settings["environment"])
    sys.path.extend(settings["packages"])
    for name in settings["preimport"]:
        importlib.import_module(name)
    if settings["uid"] is not None:
        namespaces.become(settings["uid"])
    if settings["isolate"]:
        namespaces.die_with_parent()  # a change of the id has undone bwrap's
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    gc.collect()
    gc.freeze()
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")
    channel.send(b"ready")
    uid, gid = os.getuid(), os.getgid()
    while True:
        packet, descriptors, _, _ = socket.recv_fds(channel, 4096, 3)
        if not packet:
            os._exit(0)  # the run is over
        request = json.loads(packet) | {"mapped": mapped}
        try:
            pid = namespaces.fork() if request["isolate"] else os.fork()
        except OSError as error:
            socket.socket(fileno=os.dup(descriptors[2])).send(json.dumps({"refused": str(error)}).encode())
        else:
            if pid == 0:
                channel.close()
                call.supervise(request, *descriptors, uid=uid, gid=gid)
        for descriptor in descriptors:
            os.close(descriptor)


main(socket.socket(fileno=int(sys.argv[1])))
