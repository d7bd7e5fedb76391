"""Reservation of ports for servers that bind them minutes later."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megatron_fr.errors import EngineError

_LOW, _HIGH = 20_000, 32_767
_ATTEMPTS = 256


@dataclass(frozen=True)
class PortLease(contextlib.AbstractContextManager["PortLease"]):
    """A port that no other process of this project takes until :meth:`release`, or until this process ends."""

    port: int
    lock: BinaryIO

    def release(self) -> None:
        """Give the port back; a second call is harmless."""
        self.lock.close()

    def __exit__(self, *_: object) -> None:
        self.release()


def lease_free_port(host: str) -> PortLease:
    """Reserve a free port below the kernel's ephemeral range, from which connections take theirs.

    Raises:
        EngineError: no free port was found.
    """
    high = _HIGH
    with contextlib.suppress(OSError):
        high = min(high, int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]) - 1)
    ports = range(_LOW, high + 1)
    for port in random.sample(ports, min(_ATTEMPTS, len(ports))):
        if (lease := _try_lease(host, port)) is not None:
            return lease
    raise EngineError(f"no free port found on {host} between {_LOW} and {high}; set rollout.engine_port to a free one")


def free_port(host: str) -> int:
    """Find a free port for a server that binds it at once, below the ephemeral range if possible.

    Raises:
        OSError: ``host`` is no address of this machine.
    """
    try:
        with lease_free_port(host) as lease:
            return lease.port
    except EngineError:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, 0), family=family) as probe:
            return int(probe.getsockname()[1])


def lease_port(host: str, port: int, field: str) -> PortLease:
    """Reserve the port that ``field`` of the configuration gives.

    Raises:
        EngineError: the port is in use or reserved by another run.
    """
    if (lease := _try_lease(host, port)) is not None:
        return lease
    raise EngineError(
        f"{field}: port {port} on {host} is already in use; free it, choose another, or set it to 0 for free ports"
    )


def _try_lease(host: str, port: int) -> PortLease | None:
    folder = Path(tempfile.gettempdir()) / f"megatron-fr-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = (folder / str(port)).open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Servers bind with SO_REUSEADDR, so a port in TIME_WAIT counts as free.
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError:
        lock.close()
        return None
    return PortLease(port, lock)
