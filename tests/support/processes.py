"""What tests ask of other processes. A process may end between two looks at it: that is an answer, never an error."""

from __future__ import annotations

import time

import psutil


def family_of(pid: int | None) -> list[psutil.Process]:
    """A process and all its descendants; empty once it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def command_of(process: psutil.Process) -> str:
    """Its command line; empty once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # also a zombie's
        return ""


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that still run after at most ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while (left := [p for p in processes if alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
