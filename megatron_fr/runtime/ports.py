"""Reservation of ports for servers that bind them minutes later."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

from megatron_fr.errors import EngineError

_LOW, _HIGH = 20_000, 32_767
_ATTEMPTS = 256


class PortLease:
    """A port that no other process of this project takes until :meth:`release`.

    The reservation is an advisory lock on a file, so it also ends with the process.
    """

    def __init__(self, port: int, lock_fd: int) -> None:
        self.port = port
        self._lock_fd = lock_fd

    def release(self) -> None:
        """Give the port back; a second call is harmless."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> PortLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lease_free_port(host: str) -> PortLease:
    """Reserve a free port below the kernel's ephemeral range, from which connections take theirs.

    Raises:
        EngineError: no free port was found.
    """
    high = min(_HIGH, _ephemeral_low() - 1)
    for port in random.sample(range(_LOW, high + 1), min(_ATTEMPTS, max(0, high + 1 - _LOW))):
        lease = _try_lease(host, port)
        if lease is not None:
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
        with socket.socket(family) as probe:
            probe.bind((host, 0))
            return int(probe.getsockname()[1])


def lease_port(host: str, port: int, field: str) -> PortLease:
    """Reserve one given port.

    Raises:
        EngineError: the port is in use or reserved by another run; the message names ``field``.
    """
    lease = _try_lease(host, port)
    if lease is None:
        raise EngineError(
            f"{field}: port {port} on {host} is already in use; free it, choose another, or set it to 0 for free ports"
        )
    return lease


def _try_lease(host: str, port: int) -> PortLease | None:
    folder = Path(tempfile.gettempdir()) / f"megatron-fr-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(folder / str(port), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Servers bind with SO_REUSEADDR, so a port in TIME_WAIT counts as free.
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError:
        os.close(fd)
        return None
    return PortLease(port, fd)


def _ephemeral_low() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return 32_768
