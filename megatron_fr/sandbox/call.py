"""One call as seen from the run: its descriptors, its output, its time limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

from megatron_fr.config import ToolLimits
from megatron_fr.sandbox.result import LOST, Output

_CHUNK = 1 << 16
_FULL_SPEED = 1 << 20  # bytes of output read as fast as they come; then one chunk a pause, for the loop's sake
_PAUSE_S = 0.001
#: How long the kernel may take to end a call's processes.
_END_S = 20.0


class Call:
    """Sends ``code`` to the warm interpreter behind ``channel`` and waits. Use once.

    Args:
        confirm: awaited with the host's id of the call's first process before the code runs; None: do not wait.
    """

    def __init__(
        self,
        channel: socket.socket,
        code: bytes,
        limits: ToolLimits,
        settings: dict[str, Any],
        confirm: Callable[[int], Awaitable[None]] | None,
    ) -> None:
        self._channel, self._code, self._confirm = channel, code, confirm
        self._request = json.dumps(
            settings | {"timeout_s": limits.timeout_s, "memory_mb": limits.memory_mb, "confirm": confirm is not None}
        ).encode()
        self._timeout_s = limits.timeout_s
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.output = Output(4 * limits.output_chars)  # a character takes at most 4 bytes
        self.status: int | None = None
        self.refused: str | None = None
        self.timed_out = False

    async def run(self) -> None:
        """Run the call to its end; the attributes then say how it went. TimeoutError: the sandbox itself is stuck."""
        with contextlib.ExitStack() as stack:
            memory = os.memfd_create("code")
            stack.callback(os.close, memory)
            reader, writer = os.pipe()
            stack.callback(os.close, reader)
            ours, theirs = channel_pair()
            stack.callback(ours.close)
            stack.callback(theirs.close)
            try:
                os.write(memory, self._code)
                os.lseek(memory, 0, os.SEEK_SET)
                os.set_blocking(reader, False)
                await self._send([memory, writer, theirs.fileno()])
            except OSError:
                self.refused = LOST
                return
            finally:
                os.close(writer)
                theirs.close()
            self._reader = reader
            self._loop.add_reader(reader, self._read)
            try:
                async with asyncio.timeout(self._timeout_s) as limit:
                    await self._watch(ours)
            except TimeoutError:
                self.timed_out = limit.expired()
            finally:
                ours.close()  # its first process ends now, and with it all the others
                await self._drain()

    async def _send(self, descriptors: list[int]) -> None:
        while True:
            try:
                socket.send_fds(self._channel, [self._request], descriptors)
                return
            except BlockingIOError:  # the interpreter is behind
                await asyncio.sleep(_PAUSE_S)

    async def _watch(self, ours: socket.socket) -> None:
        """Take the first process's messages until it reports the end."""
        while True:
            packet, sender = await receive(ours)
            if not packet:
                self.refused = LOST
                return
            report = json.loads(packet)
            if not report:
                assert self._confirm is not None
                try:
                    await self._confirm(sender)
                except OSError as error:
                    self.refused = f"no control group for the call: {error}"
                    return
                ours.send(b"1")
                continue
            self.status, self.refused = report.get("status"), report.get("refused")
            return

    async def _drain(self) -> None:
        """Wait for the end of the output: every process of the call is gone then."""
        try:
            async with asyncio.timeout(_END_S):
                await self._ended
        finally:
            self._loop.remove_reader(self._reader)
            self._ended.cancel()

    def _read(self) -> None:
        try:
            chunk = os.read(self._reader, _CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            self._loop.remove_reader(self._reader)
            if not self._ended.done():
                self._ended.set_result(None)
            return
        self.output.add(chunk)
        if self.output.size > _FULL_SPEED:
            self._loop.remove_reader(self._reader)
            self._loop.call_later(_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        if not self._ended.done():
            self._loop.add_reader(self._reader, self._read)


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """A pair of packet sockets; the first does not block and learns the host's process id of each sender."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return ours, theirs


async def receive(ours: socket.socket) -> tuple[bytes, int]:
    """The next packet and its sender's process id; empty once no process holds the other side."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(ours, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(ours)
    try:
        packet, ancillary, _, _ = ours.recvmsg(4096, socket.CMSG_SPACE(12))
    except ConnectionError:
        return b"", 0
    return packet, struct.unpack("iII", ancillary[0][2])[0] if ancillary else 0
