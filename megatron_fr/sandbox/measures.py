"""What the sandbox holds, tried by code that runs in it."""

from __future__ import annotations

import json

from megatron_fr.config import ToolLimits
from megatron_fr.errors import ToolError
from megatron_fr.sandbox.result import CodeResult
from megatron_fr.sandbox.root import REMEDY

#: Runs as a call: prints, as JSON, which attempts failed as they must.
PROBE = r"""
import ctypes, errno, json, os, socket
libc = ctypes.CDLL(None, use_errno=True)
held = {}
def fails(name, attempt):
    try:
        attempt()
    except OSError:
        held[name] = True
    else:
        held[name] = False
def connect():
    with socket.socket() as s:
        s.settimeout(1)
        s.connect(("127.0.0.1", 9))
def unshare():
    if libc.unshare(os.CLONE_NEWUSER) or ctypes.get_errno() == errno.EPERM:
        raise OSError
def fork():
    children = []
    try:
        for _ in range(100):
            pid = os.fork()
            if pid == 0:
                os.read(gate[0], 1)
                os._exit(0)
            children.append(pid)
    finally:
        for pid in children:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
gate = os.pipe()
fails("network", connect)
fails("writing files", lambda: open("/probe", "w"))
fails("devices", lambda: open("/dev/probe", "w"))
fails("kernel interfaces", unshare)
fails("number of processes", fork)
held["other processes"] = os.getpid() < 10 and not os.listdir("/proc")
held["privileges"] = os.getuid() != 0 and libc.prctl(39, 0, 0, 0, 0) == 1
held["files"] = not any(map(os.path.exists, ("/etc", "/home", "/var", "/run", "/sys", "/usr/sbin")))
print(json.dumps(held))
"""
_WHAT = {
    "files": "only Python, numpy, sympy and agent.tool.read_only_paths, all read-only",
    "network": "none",
    "other processes": "own pid, IPC and user namespaces, no /proc",
    "kernel interfaces": "seccomp filter",
    "privileges": "no capability, no new privileges, no root",
    "writing files": "scratch in memory, gone after the call",
    "devices": "null, zero, random",
    "number of processes": "64 a call",
}


def describe(result: CodeResult, limits: ToolLimits, grouped: bool) -> dict[str, str]:
    """Each measure and how it is held. ToolError names those that :data:`PROBE` found missing, with the remedy."""
    try:
        held = json.loads(result.output)
    except ValueError:
        raise ToolError(f"the tool sandbox does not run code: {result.error or result.output}; {REMEDY}") from None
    if missing := [name for name in _WHAT if not held.get(name)]:
        raise ToolError(
            f"the tool sandbox does not hold here: {', '.join(missing)}; it needs Linux 5.14 or newer with user "
            f"namespaces, and a user other than root where root lacks CAP_SYS_ADMIN; {REMEDY}"
        )
    memory = f"{limits.memory_mb} MiB for all processes of a call together (control group)"
    if not grouped:
        memory = f"{limits.memory_mb} MiB a process, up to 64 processes: no control group is delegated to this user"
    return _WHAT | {"memory": memory}
