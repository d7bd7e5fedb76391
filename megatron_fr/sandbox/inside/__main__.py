"""Start the warm interpreter: ``python -I -S <this folder> <descriptor of a SOCK_SEQPACKET socket>``.

Its first packet is the settings. Each further one is a call: limits in JSON, and three descriptors (code, output,
status). It only forks: code and output never pass through its memory, which every later call inherits.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
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
    gc.collect()
    gc.freeze()
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")
    channel.send(b"ready")
    Calls(channel, settings["isolate"], mapped).serve()


class Calls:
    """The calls under way. When the outside closes a call's status socket, the call is ended."""

    def __init__(self, channel: socket.socket, isolate: bool, mapped: int) -> None:
        self.channel, self.isolate, self.mapped = channel, isolate, mapped
        self.uid, self.gid = os.getuid(), os.getgid()
        self.poll = select.poll()
        self.poll.register(channel, select.POLLIN)
        self.calls: dict[int, tuple[int, int, int]] = {}  # by either descriptor: process, its pidfd, status

    def serve(self) -> NoReturn:
        while True:
            for descriptor, _ in self.poll.poll():
                if descriptor == self.channel.fileno():
                    self._start()
                elif descriptor in self.calls:  # else it went with another descriptor of this round
                    self._end(*self.calls[descriptor])

    def _start(self) -> None:
        packet, descriptors, _, _ = socket.recv_fds(self.channel, 4096, 3)
        if not packet:  # the run is over
            for ending in {*self.calls.values()} if not self.isolate else ():
                os.killpg(ending[0], signal.SIGKILL)
            os._exit(0)  # the kernel ends isolated calls with it
        code, output, status = descriptors
        request = json.loads(packet) | {"isolate": self.isolate, "mapped": self.mapped}
        try:
            pid = namespaces.fork() if self.isolate else os.fork()
            if pid == 0:
                self.channel.close()
                call.run(request, code, output, status, self.uid, self.gid)
            process = os.pidfd_open(pid)
            self.calls[process] = self.calls[status] = (pid, process, status)
            self.poll.register(process, select.POLLIN)
            self.poll.register(status, 0)  # only its end
        except OSError as error:
            _report(status, {"refused": str(error)})
            os.close(status)
        os.close(code)
        os.close(output)

    def _end(self, pid: int, process: int, status: int) -> None:
        end = os.kill if self.isolate else os.killpg
        with contextlib.suppress(ProcessLookupError):  # the kernel ends all others of its namespace with it
            end(pid, signal.SIGKILL)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        _report(status, {"status": ended})
        for descriptor in (process, status):
            self.poll.unregister(descriptor)
            del self.calls[descriptor]
            os.close(descriptor)


def _report(status: int, report: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # the outside has left
        os.write(status, json.dumps(report).encode())


main(socket.socket(fileno=int(sys.argv[1])))
