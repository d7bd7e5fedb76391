"""Runs untrusted code and reward functions in short-lived children of a small process, the zygote (``zygote/``).

A call that crashes or hangs, or whose zygote dies, ends as a result that says so; the next call starts another zygote.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_fr.agents.sandbox_results import LOST, CallResult, CodeResult, call_result, code_result
from megatron_fr.config import ToolLimits
from megatron_fr.errors import ToolError

_ZYGOTE = Path(__file__).with_name("zygote")
_START_TIMEOUT_S = 30.0
_GRACE_S = 30.0  # how much later than a call's time limit its report may come


class ForkServer:
    """One zygote and the calls in its children. Use it from one event loop, whose thread must outlive it.

    Args:
        isolate: cut calls off from network, files, processes and privileges, for :meth:`run_code`; otherwise they see
            this process's environment, working directory and ``sys.path``.
        require_network_isolation: refuse to start where ``isolate`` cannot cut off the network.
        max_parallel: calls at a time; others wait outside their time limit. None: 8 a core.
    """

    def __init__(
        self, *, isolate: bool, require_network_isolation: bool = False, max_parallel: int | None = None
    ) -> None:
        self._isolate = isolate
        self._require_network = isolate and require_network_isolation
        self._slots = asyncio.Semaphore(max_parallel or 8 * (os.cpu_count() or 1))
        self._starting = asyncio.Lock()
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reader_task: asyncio.Task[None] | None = None
        self._scratch: str | None = None
        self._imported: list[str] = []
        self._stopped = False
        self.isolation: frozenset[str] = frozenset()
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the zygote; :attr:`isolation` then says what calls are cut off from. ToolError where it cannot."""
        self._stopped = False
        async with self._starting:
            await self._launch()

    async def run_code(self, code: str, limits: ToolLimits) -> CodeResult:
        """Run ``code`` as a program; ToolError only where the sandbox cannot be started."""
        if not self._isolate:
            raise ValueError("code runs only in a ForkServer with isolate=True")
        started = time.monotonic()
        keep = 4 * limits.output_chars  # a character takes at most 4 bytes
        report = await self._request(
            {"kind": "code", "code": code, "memory_mb": limits.memory_mb}, timeout_s=limits.timeout_s, keep_bytes=keep
        )
        return code_result(report, limits, time.monotonic() - started)

    async def call(self, function: str, arguments: Mapping[str, Any], *, timeout_s: float) -> CallResult:
        """Call ``module:name`` with JSON arguments in a child; ToolError only where the sandbox cannot be started."""
        report = await self._request(
            {"kind": "call", "function": function, "arguments": dict(arguments)}, timeout_s=timeout_s, keep_bytes=8192
        )
        return call_result(report, timeout_s)

    async def preload(self, function: str, *, timeout_s: float = 60.0) -> str | None:
        """Import ``module:name`` in this and every later zygote, for its children; returns the problem, or None."""
        if function not in self._imported:
            self._imported.append(function)
        return await self._import(function, timeout_s)

    async def stop(self) -> None:
        self._stopped = True
        async with self._starting:
            await self._close()

    async def _request(self, message: dict[str, Any], *, timeout_s: float, keep_bytes: int) -> dict[str, Any]:
        async with self._slots:
            if not self._alive():
                async with self._starting:
                    if not self._alive():
                        self.restarts += 1
                        await self._launch()
            try:
                async with asyncio.timeout(timeout_s + _GRACE_S):
                    return await self._ask({**message, "timeout_s": timeout_s, "keep_bytes": keep_bytes})
            except TimeoutError:  # the zygote itself is stuck
                self._kill()
                return {"refused": LOST}

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        number = next(self._ids)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            await self._send({**message, "id": number})
            return await future
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                await self._send({"kind": "cancel", "id": number})
            raise
        except OSError:  # the pipe broke: the reader will find out as well
            return {"refused": LOST}
        finally:
            self._waiting.pop(number, None)

    async def _send(self, message: dict[str, Any]) -> None:
        if self._writer is None:
            raise ConnectionResetError(LOST)
        payload = json.dumps(message, default=str).encode()
        self._writer.write(len(payload).to_bytes(4, "big") + payload)
        await self._writer.drain()

    def _alive(self) -> bool:
        return self._reader_task is not None and not self._reader_task.done()

    async def _launch(self) -> None:
        if self._stopped:
            raise ToolError("the sandbox was stopped; call start() before running anything in it")
        await self._close()
        if self._isolate:
            self._scratch = tempfile.mkdtemp(prefix="megatron-fr-tool-")
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *(["-I"] if self._isolate else []),
                str(_ZYGOTE),
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C at the terminal is for the run, which then stops the zygote
                cwd="/" if self._isolate else None,
                env=_clean_environment() if self._isolate else {**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
        except OSError as error:
            ours.close()
            raise ToolError(f"the sandbox could not start {sys.executable}: {error}") from error
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        settings = {"isolate": self._isolate, "scratch": self._scratch or "", "sys_path": _import_path()}
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._send(settings)
                self.isolation = frozenset((await _receive(reader))["ready"])
        except (OSError, EOFError, TimeoutError) as error:
            await self._close()
            raise ToolError(
                f"the sandbox process did not become ready within {_START_TIMEOUT_S:g} s or died; "
                "its traceback, if any, is on standard error"
            ) from error
        if self._require_network and "network" not in self.isolation:
            await self._close()
            raise ToolError(
                "agent.tool.require_network_isolation=true, but this kernel or container allows no network namespace; "
                "allow unprivileged user namespaces (or CAP_SYS_ADMIN), or set it to false and let tools reach the "
                "network"
            )
        self._reader_task = asyncio.create_task(self._read_reports(reader))
        for function in self._imported:
            await self._import(function, _START_TIMEOUT_S)

    async def _import(self, function: str, timeout_s: float) -> str | None:
        try:
            async with asyncio.timeout(timeout_s):
                report = await self._ask({"kind": "import", "function": function})
        except TimeoutError:
            await self._close()  # the zygote is stuck in that import
            return f"importing it took longer than {timeout_s:g} s"
        return report.get("problem") or report.get("refused")

    async def _read_reports(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                report = await _receive(reader)
                future = self._waiting.get(report["id"])
                if future is not None and not future.done():
                    future.set_result(report)
        except (OSError, EOFError):
            return  # the zygote is gone
        finally:
            for future in self._waiting.values():
                if not future.done():
                    future.set_result({"refused": LOST})

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()  # the guard then kills the zygote and everything below it

    async def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()  # the zygote ends by itself when its socket closes
            self._writer = None
        if self._process is not None:
            try:
                async with asyncio.timeout(2):
                    await self._process.wait()
            except TimeoutError:
                self._kill()
                await self._process.wait()
            self._process = None
        if self._reader_task is not None:
            self._reader_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader_task
            self._reader_task = None
        if self._scratch is not None:
            await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)
            self._scratch = None


async def _receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    size = int.from_bytes(await reader.readexactly(4), "big")
    report: dict[str, Any] = json.loads(await reader.readexactly(size))
    return report


def _clean_environment() -> dict[str, str]:
    """What untrusted code may know: no keys, no paths of the run; numeric libraries stay on one thread."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PATH": os.defpath, "LANG": "C.UTF-8", **threads}


def _import_path() -> list[str]:
    return list(dict.fromkeys(os.path.abspath(entry) for entry in sys.path))
