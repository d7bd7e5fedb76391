"""The sandbox as a run uses it: starts the warm interpreter, queues calls, counts what it could not run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from pathlib import Path
from typing import Any

from megatron_fr.config import ToolLimits
from megatron_fr.errors import RolloutEnded, ToolError
from megatron_fr.sandbox import root
from megatron_fr.sandbox.call import Call, channel_pair, receive
from megatron_fr.sandbox.cgroup import MemoryGroups
from megatron_fr.sandbox.measures import PROBE, describe
from megatron_fr.sandbox.result import LOST, CodeResult, code_error, timeout_error, visible

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_MAX_CODE = 1_000_000  # characters
#: Calls of one owner that run at a time, and that may wait.
_PER_OWNER, _WAITING_PER_OWNER = 4, 64


class Sandbox:
    """One warm interpreter and the calls forked from it. Use it from one event loop.

    Args:
        limits: of every call, and ``agent.tool.sandbox``.
        slots: calls at a time; others wait, first come first served, outside their time limit. None: 64 a core, within
            128 and 512, so that calls that only sleep hold up nobody.
    """

    def __init__(self, limits: ToolLimits, *, slots: int | None = None) -> None:
        self._limits = limits
        self._isolate = limits.sandbox == "bwrap"
        self._slots = asyncio.Semaphore(slots or min(512, max(128, 64 * (os.cpu_count() or 1))))
        self._owners: dict[Hashable, asyncio.Semaphore] = {}
        self._waiting: Counter[Hashable] = Counter()
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._channel: socket.socket | None = None
        self._watch: asyncio.Task[None] | None = None
        self._groups: MemoryGroups | None = None
        self._stopped = True
        self._refused_in_a_row = 0
        self.refused = 0
        self.restarts = 0
        self.measures: dict[str, str] = {}

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start it, try every measure, log what holds. ToolError with the remedy where one is missing."""
        self._stopped = False
        try:
            async with self._starting:
                self._groups = MemoryGroups() if self._isolate else None
                await self._launch()
            if self._isolate:
                result = await self._call(
                    PROBE, self._limits.model_copy(update={"timeout_s": 60, "output_chars": 4096})
                )
                grouped = self._groups is not None and self._groups.folder is not None
                self.measures = describe(result, self._limits, grouped)
        except BaseException:
            await self.stop()
            raise
        if self._isolate:
            log.info("tool sandbox: %s", "; ".join(f"{name}: {what}" for name, what in self.measures.items()))
        else:
            log.warning("agent.tool.sandbox=none: model-written code runs with all rights of this user")

    async def run_code(
        self, code: str, limits: ToolLimits | None = None, *, owner: Hashable | None = None
    ) -> CodeResult:
        """Run ``code`` as a program. Few calls of one ``owner``, such as a trajectory, run at a time.

        Raises:
            ToolError: the sandbox cannot be started.
            RolloutEnded: it could not run ``agent.tool.max_refusals`` calls in a row.
        """
        limits, started = limits or self._limits, time.monotonic()
        if len(code) > _MAX_CODE:
            return CodeResult("", f"the code has {len(code)} characters; at most {_MAX_CODE} are run", False, 0.0)
        if self._waiting[owner] >= _WAITING_PER_OWNER and owner is not None:
            return CodeResult("", f"more than {_WAITING_PER_OWNER} calls at once", False, 0.0)
        async with self._turn(owner):
            result = await self._call(code, limits)
        self._count(result)
        return CodeResult(
            result.output, result.error, result.timed_out, time.monotonic() - started, refused=result.refused
        )

    async def stop(self) -> None:
        self._stopped = True
        async with self._starting:
            await self._close()
            if self._groups is not None:
                await asyncio.to_thread(self._groups.close)
                self._groups = None

    @contextlib.asynccontextmanager
    async def _turn(self, owner: Hashable | None) -> AsyncIterator[None]:
        if owner is None:
            async with self._slots:
                yield
            return
        own = self._owners.setdefault(owner, asyncio.Semaphore(_PER_OWNER))
        self._waiting[owner] += 1
        try:
            async with own, self._slots:
                yield
        finally:
            self._waiting[owner] -= 1
            if not self._waiting[owner]:
                del self._waiting[owner], self._owners[owner]

    def _count(self, result: CodeResult) -> None:
        if not result.refused:
            self._refused_in_a_row = 0
            return
        self.refused += 1
        self._refused_in_a_row += 1
        log.warning("the tool sandbox refused a call: %s", result.error)
        if self._refused_in_a_row >= self._limits.max_refusals:
            raise RolloutEnded(
                f"the tool sandbox refused {self._refused_in_a_row} calls in a row (agent.tool.max_refusals): "
                f"{result.error}"
            )

    async def _call(self, code: str, limits: ToolLimits) -> CodeResult:
        if self._process is None or self._process.returncode is not None:
            async with self._starting:
                if self._process is None or self._process.returncode is not None:
                    self.restarts += 1
                    await self._launch()
        process, channel = self._process, self._channel
        assert process is not None
        assert channel is not None
        folder = (
            root.SCRATCH if self._isolate else await asyncio.to_thread(tempfile.mkdtemp, prefix="megatron-fr-tool-")
        )
        group: Path | None = None

        async def confirm(pid: int) -> None:
            nonlocal group
            assert self._groups is not None
            group = await asyncio.to_thread(self._groups.enter, pid, limits.memory_mb)

        grouped = self._groups is not None and self._groups.folder is not None
        settings = {"folder": folder}
        call = Call(channel, code.encode("utf-8", "surrogatepass"), limits, settings, confirm if grouped else None)
        try:
            await call.run()
        except TimeoutError:  # the interpreter is stuck
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            call.refused = LOST
        finally:
            if group is not None and self._groups is not None:
                self._groups.give_back(group, limits.memory_mb)
            if not self._isolate:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return _result(call, limits)

    async def _launch(self) -> None:
        if self._stopped:
            raise ToolError("the sandbox was stopped; call start() before running anything in it")
        await self._close()
        ours, theirs = channel_pair()
        self._channel = ours
        errors = os.memfd_create("errors")
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C at the terminal is for the run, which then stops this
                cwd="/",
                env={},  # the first process of a pid namespace shows it to the others
            )
            theirs.close()
            ours.send(json.dumps(self._settings()).encode())
            async with asyncio.timeout(_START_TIMEOUT_S):
                ready, pid = await receive(ours)
        except (OSError, TimeoutError) as error:
            ready, reason = b"", str(error)
        else:
            reason = os.pread(errors, 4096, 0).decode(errors="replace").strip().rpartition("\n")[2]
        finally:
            theirs.close()
            os.close(errors)
        if not ready:
            await self._close()
            raise ToolError(
                f"the tool sandbox did not start: {visible(reason) or 'no answer'}; allow user namespaces to this "
                f"user or container (sysctl user.max_user_namespaces), {root.REMEDY}"
            )
        assert self._process is not None
        self._watch = asyncio.create_task(_end_together(self._process, os.pidfd_open(pid)))

    def _command(self, channel: int) -> list[str]:
        if self._isolate:
            return root.command(self._limits.read_only_paths, channel)
        return [sys.executable, "-I", "-S", str(root.INSIDE), str(channel)]

    def _settings(self) -> dict[str, Any]:
        packages = [root.PACKAGES] if self._isolate else root.package_folders()
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        paths = {"PATH": "/bin:/usr/bin", "PYTHONPATH": os.pathsep.join(packages)}
        return {
            "isolate": self._isolate,
            "uid": root.UNUSED_UID if self._isolate and root.is_root() else None,
            "packages": packages,
            "preimport": root.PREIMPORT,
            "environment": {"LANG": "C.UTF-8", "USER": "tool", **threads, **paths},
        }

    async def _close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None
        if self._watch is not None:
            await self._watch
            self._watch = None


async def _end_together(process: asyncio.subprocess.Process, interpreter: int) -> None:
    """Once bwrap has ended, end the warm interpreter: as another user it does not get the kernel's signal."""
    try:
        await process.wait()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(interpreter, signal.SIGKILL)
    finally:
        os.close(interpreter)


def _result(call: Call, limits: ToolLimits) -> CodeResult:
    output = call.output.text(limits.output_chars)
    if call.timed_out:
        return CodeResult(output, timeout_error(limits), True, 0.0)
    if call.refused is not None or call.status is None:
        return CodeResult(output, call.refused or LOST, False, 0.0, refused=True)
    return CodeResult(output, code_error(call.status, output), False, 0.0)
