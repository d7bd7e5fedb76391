"""``python -m tests.sandbox.attack``: plants what is worth finding, runs every attempt, prints the outputs as JSON.

A process of its own, so that it can be another user's.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megatron_fr.config import ToolLimits
from megatron_fr.sandbox import Sandbox
from tests.sandbox.escapes import CALLS, PAIRS, PRELUDE, SUM, Pair

CHECKOUT = Path(__file__).resolve().parents[2]
LIMITS = ToolLimits(memory_mb=512)


class Outside:
    """What is planted, by the names that programs use."""

    def __init__(self, folder: Path) -> None:
        self.names = {
            "FOLDER": str(folder),
            "CHECKOUT": str(CHECKOUT),
            "PID": str(os.getpid()),
            "HOME": str(Path.home()),
        }
        for name, mode in (("private", 0o600), ("public", 0o644), ("writable", 0o666)):
            (folder / name).write_text("planted")
            (folder / name).chmod(mode)
        os.environ["SECRET_KEY_OF_THE_RUN"] = "planted"
        self.sockets = [socket.create_server(("127.0.0.1", 0))]
        self.names["PORT"] = str(self.sockets[0].getsockname()[1])
        self.names["ABSTRACT"] = f"planted-{os.getpid()}"
        for address in (str(folder / "socket"), f"\0{self.names['ABSTRACT']}"):
            self.sockets.append(socket.socket(socket.AF_UNIX))
            self.sockets[-1].bind(address)
            self.sockets[-1].listen()
        libc = ctypes.CDLL(None, use_errno=True)
        self.names["KEY"] = str(libc.syscall(248, b"user", b"planted", b"planted", 7, -3))
        self.victim = subprocess.Popen(["sleep", "600"])
        self.names["VICTIM"] = str(self.victim.pid)

    def program(self, code: str) -> str:
        for name, value in self.names.items():
            code = code.replace(f"@{name}@", value)
        return PRELUDE + code

    def close(self) -> bool:
        """Whether what was planted is as it was."""
        alive = self.victim.poll() is None
        self.victim.kill()
        self.victim.wait()
        for listener in self.sockets:
            listener.close()
        folder = Path(self.names["FOLDER"])
        return alive and all((folder / name).read_text() == "planted" for name in ("private", "public", "writable"))


async def main() -> None:
    outputs: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        outside = Outside(Path(folder))
        sandbox = Sandbox(LIMITS)
        try:
            await sandbox.start()
            for case in (*CALLS, SUM):
                limits = LIMITS.model_copy(update={"timeout_s": case.timeout_s})
                result = await sandbox.run_code(outside.program(case.code), limits)
                outputs[f"call: {case.title}"] = f"{result.output}{result.error or ''}"
            for pair in PAIRS:
                outputs[f"pair: {pair.title}"] = await _pair(sandbox, outside, pair)
            assert sandbox.restarts == sandbox.refused == 0
            measures = sandbox.measures
        finally:
            await sandbox.stop()
            intact = outside.close()
    json.dump({"uid": os.getuid(), "intact": intact, "measures": measures, "outputs": outputs}, sys.stdout)


async def _pair(sandbox: Sandbox, outside: Outside, pair: Pair) -> str:
    limits = LIMITS.model_copy(update={"timeout_s": pair.timeout_s})
    first = asyncio.create_task(sandbox.run_code(outside.program(pair.first), limits, owner="first"))
    if pair.together:
        await asyncio.sleep(0.5)
    else:
        await first
    started = time.monotonic()
    second = await sandbox.run_code(outside.program(pair.second), limits, owner="second")
    waited = time.monotonic() - started
    output = f"{second.output}{second.error or ''}"
    result = await first
    if "genuine" in pair.first and result.output != "genuine\n":
        output += f"ESCAPE: the other call's output is {result.output!r}"
    if waited > 8:
        output += f"ESCAPE: the second call took {waited:.1f} s"
    return output


if __name__ == "__main__":
    asyncio.run(main())
