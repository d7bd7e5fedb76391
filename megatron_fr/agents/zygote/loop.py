"""The zygote's event loop: forks a child for each request, watches it, answers."""

from __future__ import annotations

import contextlib
import gc
import heapq
import json
import os
import selectors
import shutil
import signal
import socket
import time
import traceback
from dataclasses import dataclass, field
from typing import Any, NoReturn

import isolation  # beside this file
import jobs  # beside this file

_CHUNK = 1 << 16
_DRAIN_CHUNKS = 64
_RESULT_BYTES = 1 << 20
_SCRATCH_MB = 256
_SETUP_FAILED = 70


@dataclass
class Job:
    """One running child and what it has said so far."""

    id: int
    pid: int
    pidfd: int
    output: int
    result: int | None
    folder: str | None
    slot: int
    keep: int  # bytes of output kept at each end
    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    dropped: int = 0
    answer: bytearray = field(default_factory=bytearray)
    timed_out: bool = False

    def add(self, chunk: bytes) -> None:
        """Keep the output's beginning and its end; only count what lies between."""
        room = max(0, self.keep - len(self.head))
        self.head += chunk[:room]
        self.tail += chunk[room:]
        if (excess := len(self.tail) - self.keep) > _CHUNK:
            del self.tail[:excess]
            self.dropped += excess

    def report(self, status: int) -> dict[str, Any]:
        if self.dropped == 0:
            self.head, self.tail = self.head + self.tail, bytearray()
        head, tail = (part.decode(errors="replace") for part in (self.head, self.tail))
        report: dict[str, Any] = {"id": self.id, "head": head, "tail": tail, "dropped": self.dropped}
        report |= {"status": status, "timed_out": self.timed_out}
        if self.result is not None:
            report["answer"] = self.answer.decode(errors="replace")
        return report


class Zygote:
    """Single-threaded, so that forking is safe."""

    def __init__(self, channel: socket.socket, settings: dict[str, Any], held: set[str]) -> None:
        self.channel = channel
        self.scratch: str = settings["scratch"]  # empty where no code will run
        self.held = held
        self.jobs: dict[int, Job] = {}
        self.slots = list(range(isolation.NUM_UIDS))
        self.deadlines: list[tuple[float, int]] = []
        self.selector = selectors.DefaultSelector()
        self.inbox = bytearray()
        self.namespace = os.open("/proc/self/ns/pid", os.O_RDONLY) if "processes" in held else None
        if self.scratch:
            os.chmod(self.scratch, 0o711)
            if isolation.freeze_files(self.scratch, _SCRATCH_MB):
                held.add("files")

    def serve(self) -> NoReturn:
        self.selector.register(self.channel, selectors.EVENT_READ, self._receive)
        self._send({"ready": sorted(self.held)})
        gc.collect()
        gc.freeze()
        while True:
            wait = max(0.0, self.deadlines[0][0] - time.monotonic()) if self.deadlines else None
            for key, _ in self.selector.select(wait):
                if key.fd in self.selector.get_map():  # an earlier handler of this round may have closed it
                    key.data()
            while self.deadlines and self.deadlines[0][0] <= time.monotonic():
                job = self.jobs.get(heapq.heappop(self.deadlines)[1])
                if job is not None:
                    job.timed_out = True
                    self._kill(job)

    def _send(self, message: dict[str, Any]) -> None:
        payload = json.dumps(message).encode()
        self.channel.sendall(len(payload).to_bytes(4, "big") + payload)

    def _receive(self) -> None:
        chunk = self.channel.recv(_CHUNK)
        if not chunk:
            self._hang_up()
        self.inbox += chunk
        while len(self.inbox) >= 4 and len(self.inbox) >= 4 + (size := int.from_bytes(self.inbox[:4], "big")):
            message = json.loads(self.inbox[4 : 4 + size])
            del self.inbox[: 4 + size]
            self._handle(message)

    def _hang_up(self) -> NoReturn:
        for job in self.jobs.values():
            self._kill(job)
        os._exit(0)

    def _handle(self, message: dict[str, Any]) -> None:
        if message["kind"] == "cancel":
            if (job := self.jobs.get(message["id"])) is not None:
                self._kill(job)
        elif message["kind"] == "import":
            self._import(message)
        else:
            try:
                self._start(message)
            except (OSError, IndexError) as error:
                self._send({"id": message["id"], "refused": f"the sandbox could not start a process: {error}"})

    def _import(self, message: dict[str, Any]) -> None:
        problem = None
        try:
            if not callable(jobs.resolve(message["function"])):
                problem = "TypeError: it is not callable"
        except BaseException as error:
            traceback.print_exc()
            problem = traceback.format_exception_only(error)[-1].strip()
        gc.collect()
        gc.freeze()
        self._send({"id": message["id"], "problem": problem})

    def _start(self, message: dict[str, Any]) -> None:
        is_code = message["kind"] == "code"
        slot = self.slots.pop()
        folder = None
        if is_code:
            folder = os.path.join(self.scratch, str(message["id"]))
            os.mkdir(folder, 0o700)
        output, output_write = os.pipe()
        result, result_write = (None, None) if is_code else os.pipe()
        pid = self._fork()
        if pid == 0:
            self._be_child(message, slot, folder, output_write, result_write)
        os.close(output_write)
        job = Job(message["id"], pid, os.pidfd_open(pid), output, result, folder, slot, message["keep_bytes"])
        self.jobs[job.id] = job
        os.set_blocking(output, False)
        self.selector.register(output, selectors.EVENT_READ, lambda: self._read(job, output))
        if result is not None and result_write is not None:
            os.close(result_write)
            os.set_blocking(result, False)
            self.selector.register(result, selectors.EVENT_READ, lambda: self._read(job, result))
        self.selector.register(job.pidfd, selectors.EVENT_READ, lambda: self._finish(job))
        heapq.heappush(self.deadlines, (time.monotonic() + message["timeout_s"], job.id))

    def _fork(self) -> int:
        """Fork; the child is the first process of its own namespace, so that its death ends all its descendants."""
        if self.namespace is None:
            return os.fork()
        os.unshare(os.CLONE_NEWPID)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                os.setns(self.namespace, os.CLONE_NEWPID)
        return pid

    def _be_child(
        self, message: dict[str, Any], slot: int, folder: str | None, output: int, result: int | None
    ) -> NoReturn:
        try:
            gc.unfreeze()
            uid = isolation.uid_of_slot(slot)
            if folder is not None and os.geteuid() == 0:
                with contextlib.suppress(OSError):  # ids that are not mapped in this container
                    os.chown(folder, uid, uid)
            jobs.become_child(output, result, folder)
            if message["kind"] == "code":
                jobs.run_code(message["code"], message["timeout_s"], message["memory_mb"], uid)
            jobs.call(message["function"], message["arguments"])
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(_SETUP_FAILED)

    def _read(self, job: Job, descriptor: int) -> bool:
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            if descriptor in self.selector.get_map():
                self.selector.unregister(descriptor)
            return False
        if descriptor == job.output:
            job.add(chunk)
        elif len(job.answer) <= _RESULT_BYTES:
            job.answer += chunk
        return True

    def _kill(self, job: Job) -> None:
        for kill in (os.kill, os.killpg):  # the group is not there yet when the child has just been forked
            with contextlib.suppress(ProcessLookupError):
                kill(job.pid, signal.SIGKILL)

    def _finish(self, job: Job) -> None:
        self._kill(job)
        _, status = os.waitpid(job.pid, 0)
        for descriptor in (job.output, job.result):
            if descriptor is None:
                continue
            for _ in range(_DRAIN_CHUNKS):
                if not self._read(job, descriptor):
                    break
            if descriptor in self.selector.get_map():
                self.selector.unregister(descriptor)
            os.close(descriptor)
        self.selector.unregister(job.pidfd)
        os.close(job.pidfd)
        del self.jobs[job.id]
        self.slots.append(job.slot)
        self._send(job.report(os.waitstatus_to_exitcode(status)))
        if job.folder is not None:
            self._remove(job.folder)

    def _remove(self, folder: str) -> None:
        """Remove a scratch folder; a process of its own removes a full one, which may take long."""
        with contextlib.suppress(OSError):
            os.rmdir(folder)
            return
        pid = os.fork()
        if pid == 0:
            try:
                shutil.rmtree(folder, onexc=_make_writable)
            finally:
                os._exit(0)
        pidfd = os.pidfd_open(pid)

        def reap() -> None:
            os.waitpid(pid, 0)
            self.selector.unregister(pidfd)
            os.close(pidfd)

        self.selector.register(pidfd, selectors.EVENT_READ, reap)


def _make_writable(function: Any, path: str, error: BaseException) -> None:
    parent = os.path.dirname(path)
    os.chmod(parent, 0o700)
    if os.path.isdir(path):
        os.chmod(path, 0o700)
        shutil.rmtree(path, ignore_errors=True)
    else:
        function(path)
