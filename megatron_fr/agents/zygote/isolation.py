"""Cut untrusted code off from network, other processes, the file system, privileges and resources."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
from collections.abc import Sequence

_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 8, 36, 38
_CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION_3 = 0x20080522
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 0x1, 0x2, 0x4, 0x4000, 0x40000
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = -100, 0x8000, 0x1
_SYS_MOUNT_SETATTR = 442  # the same number on every architecture

#: Unprivileged user ids that calls run as when the server is root; one a slot, so that process limits are per call.
_FIRST_UID, NUM_UIDS = 61184, 4096

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: int) -> None:
    _check(_libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0))


def adopt_orphans() -> None:
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def enter_namespaces() -> set[str]:
    """Leave the host's network and, after the next fork, its processes; return what the kernel let it leave."""
    network, everything = os.CLONE_NEWNET, os.CLONE_NEWNET | os.CLONE_NEWPID | os.CLONE_NEWIPC
    privileged = os.geteuid() == 0
    for with_user in (False, True) if privileged else (True,):
        for flags in (everything, network):
            if _unshare(flags, with_user=with_user):
                return {"network", "processes"} if flags == everything else {"network"}
    return set()


def _unshare(flags: int, *, with_user: bool) -> bool:
    uid, gid = os.getuid(), os.getgid()
    try:
        os.unshare(flags | (os.CLONE_NEWUSER if with_user else 0))
    except OSError:
        return False
    if with_user:
        for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    return True


def freeze_files(scratch: str, megabytes: int) -> bool:
    """Make all files but in-memory ``scratch`` read-only, and hide ``/proc``; false where that is not allowed."""
    attributes = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    try:
        os.unshare(os.CLONE_NEWNS)
        _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
        _check(_libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes)))
        _mount_tmpfs(scratch, _MS_NOSUID | _MS_NODEV, f"size={megabytes}m,nr_inodes=65536,mode=711")
        _mount_tmpfs("/dev/shm", _MS_NOSUID | _MS_NODEV, "size=64m,mode=1777")
        _mount_tmpfs("/proc", _MS_NOSUID | _MS_NODEV | _MS_RDONLY, "size=4k,mode=555")
    except OSError:
        return False
    return True


def _mount_tmpfs(where: str, flags: int, options: str) -> None:
    _check(_libc.mount(b"tmpfs", os.fsencode(where), b"tmpfs", flags, options.encode()))


def uid_of_slot(slot: int) -> int:
    return _FIRST_UID + slot % NUM_UIDS


def limit_resources(seconds: float, memory_mb: int) -> None:
    """Bound CPU time, address space, file size, processes, descriptors; no core dumps."""
    cpu = int(seconds) + 2
    megabytes = 1 << 20
    limits: Sequence[tuple[int, int]] = (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory_mb * megabytes),
        (resource.RLIMIT_FSIZE, min(memory_mb, 64) * megabytes),
        (resource.RLIMIT_NPROC, 64),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
    )
    for name, value in limits:
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def drop_privileges(uid: int) -> None:
    """Become ``uid`` where this process is root; keep only reading, as root may own the interpreter's folder."""
    keep = 0
    if os.geteuid() == 0:
        _check(_libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0))
        with contextlib.suppress(OSError):  # ids that are not mapped in this container
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            keep = 1 << _CAP_DAC_READ_SEARCH
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    held = struct.pack("IIIIII", keep, keep, 0, 0, 0, 0)  # effective, permitted, inheritable: low then high words
    if _libc.capset(header, held) != 0:  # it was not among those held
        _check(_libc.capset(header, bytes(24)))
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def _check(status: int) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
