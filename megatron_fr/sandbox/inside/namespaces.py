"""A process in namespaces of its own, without capabilities. Works without privileges."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CAPABILITY_VERSION_3 = 0x20080522
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 0x1, 0x2, 0x4
_CLONE = {"x86_64": 56, "aarch64": 220}
_NEW = os.CLONE_NEWUSER | os.CLONE_NEWPID | os.CLONE_NEWNS | os.CLONE_NEWIPC | os.CLONE_NEWNET
#: Sizes in MiB of the file systems in memory that a call may write to.
WRITABLE = {"/scratch": 128, "/dev/shm": 64}

libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock, which a raw clone must not lose


def check(status: int) -> int:
    if status < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return status


def become(uid: int) -> None:
    """Change to an id that owns nothing; root's processes would escape the limit on processes."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    check(libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0))  # else /proc/self/uid_map is root's


def die_with_parent() -> None:
    check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def fork() -> int:
    """As ``os.fork``; the child is the first process of new user, pid, mount, IPC and network namespaces."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = libc.syscall(_CLONE[platform.machine()], _NEW | signal.SIGCHLD, 0, 0, 0, 0)
    number = ctypes.get_errno()
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, f"no namespaces for the call: {os.strerror(number)}")
    return pid


def settle(uid: int, gid: int) -> None:
    """After :func:`fork`: take an ordinary user's id, get empty scratch folders, hide ``/proc``."""
    for name, line in (("setgroups", "deny"), ("uid_map", f"1000 {uid} 1"), ("gid_map", f"1000 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    for folder, megabytes in WRITABLE.items():
        options = f"size={megabytes}m,nr_inodes=16384,mode=1777"
        check(libc.mount(b"tmpfs", folder.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options.encode()))
    check(libc.mount(b"tmpfs", b"/proc", b"tmpfs", _MS_NOSUID | _MS_NODEV | _MS_RDONLY, b"size=4k,mode=555"))


def drop_capabilities() -> None:
    """Give up every capability, and the means to get one by running a program."""
    check(libc.capset(struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24)))
    check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
