"""The system call filter of a call: a list of what is denied, and nothing newer than the list knows."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

#: Denied calls, as ``name x86_64 aarch64``; ``-`` where the architecture has none. From 424 on the numbers agree.
_DENIED = """
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, pidfd_getfd 438 438,
process_madvise 440 440, unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51,
open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433,
mount_setattr 442 442, mknod 133 -, mknodat 259 33, name_to_handle_at 303 264, open_by_handle_at 304 265,
add_key 248 217, request_key 249 218, keyctl 250 219, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282,
io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, io_setup 206 0, seccomp 317 277,
landlock_create_ruleset 444 444, landlock_add_rule 445 445, landlock_restrict_self 446 446, memfd_create 319 279,
memfd_secret 447 447, shmget 29 194, shmat 30 196, semget 64 190, msgget 68 186, mq_open 240 180, personality 135 92,
modify_ldt 154 -, iopl 172 -, ioperm 173 -, uselib 134 -, acct 163 89, swapon 167 224, swapoff 168 225, reboot 169 142,
sethostname 170 161, setdomainname 171 162, init_module 175 105, finit_module 313 273, delete_module 176 106,
kexec_load 246 104, kexec_file_load 320 294, quotactl 179 60, quotactl_fd 443 443, lookup_dcookie 212 18,
syslog 103 116, vhangup 153 58, settimeofday 164 170, clock_settime 227 112, adjtimex 159 171, clock_adjtime 305 266,
fanotify_init 300 262, fanotify_mark 301 263, mbind 237 235, set_mempolicy 238 237, migrate_pages 256 238,
move_pages 279 239, vmsplice 278 75, process_mrelease 448 448
"""
_NEWEST = 448  # later numbers were unknown when this list was written: they do not exist for a call
#: By architecture: column in the list, AUDIT_ARCH_*, and the numbers of clone, socket and socketpair.
_ARCHITECTURES = {"x86_64": (1, 0xC000003E, 56, 41, 53), "aarch64": (2, 0xC00000B7, 220, 198, 199)}
_CLONE3, _NEW_NAMESPACES = 435, 0x7E020000
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_PR_SET_SECCOMP, _FILTER = 22, 2

SUPPORTED = tuple(_ARCHITECTURES)


def program() -> bytes:
    """The filter in the kernel's form. KeyError on an architecture that :data:`SUPPORTED` lacks."""
    column, audit, clone, socket, socketpair = _ARCHITECTURES[platform.machine()]
    lines: list[tuple[int, int, int, int]] = [  # operation, jump if true, jump if false, value
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL),  # another architecture's calls have other numbers
        (_LOAD, 0, 0, 0),
        (_GREATER, 0, 1, _NEWEST),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
        (_EQUAL, 0, 1, _CLONE3),  # its flags are in memory, out of sight; libraries then use clone
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
    ]
    for entry in _DENIED.split(","):
        if (number := entry.split()[column]) != "-":
            lines += [(_EQUAL, 0, 1, int(number)), (_RETURN, 0, 0, _ERROR | errno.EPERM)]
    lines += [
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, 16),
        (_ANY_BIT, 0, 8, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
        (_EQUAL, 1, 0, socket),
        (_EQUAL, 0, 5, socketpair),
        (_LOAD, 0, 0, 16),
        (_EQUAL, 3, 0, _AF_UNIX),
        (_EQUAL, 2, 0, _AF_INET),
        (_EQUAL, 1, 0, _AF_INET6),
        (_RETURN, 0, 0, _ERROR | errno.EAFNOSUPPORT),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def install(libc: ctypes.PyDLL) -> None:
    """Put the filter on this process and its later children; needs ``no_new_privs``. OSError where it is refused."""
    code = program()
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, header, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, "the system call filter was refused")
