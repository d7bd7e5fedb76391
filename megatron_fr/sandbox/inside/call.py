"""What the process of one call does: leaves everything behind, then runs the code."""

from __future__ import annotations

import fcntl
import json
import linecache
import os
import resource
import signal
import sys
import traceback
from typing import Any, NoReturn

import namespaces  # beside this file
import seccomp  # beside this file

_FILENAME = "<tool>"
_NICE = 10
_MIB = 1 << 20


def run(request: dict[str, Any], code: int, output: int, status: int, uid: int, gid: int) -> NoReturn:
    """Isolate this process, the first of its namespaces, and execute ``code`` in it; exit status 1 after an exception.

    ``status`` is a socket to the outside, closed before the code runs, which so cannot forge a report.
    """
    try:
        if request["confirm"]:  # the outside puts this process into its control group
            os.write(status, b"{}")
            if not os.read(status, 1):
                os._exit(0)
        if request["isolate"]:
            namespaces.settle(uid, gid)
            namespaces.drop_capabilities()
            seccomp.install(namespaces.libc)
        os.setsid()
        os.nice(_NICE)
        os.chdir(request["folder"])
        with open(code, "rb", closefd=False) as file:
            text = file.read().decode("utf-8", "surrogatepass")
    except OSError as error:
        os.write(status, json.dumps({"refused": str(error)}).encode())
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    _standard_streams(output)
    os.environ.update(HOME=request["folder"], TMPDIR=request["folder"])
    _limit(request["timeout_s"], request["memory_mb"], request["mapped"])
    linecache.cache[_FILENAME] = (len(text), None, text.splitlines(keepends=True), _FILENAME)
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    sys.argv = [_FILENAME]
    status = 0
    try:
        exec(compile(text, _FILENAME, "exec", dont_inherit=True), main.__dict__)
        _join_threads()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if status and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except BaseException as error:
        status = 1
        _print_error(error)
    _flush()
    os._exit(status & 0xFF)


def _standard_streams(output: int) -> None:
    """No input, both outputs into one pipe, every other descriptor closed."""
    null = os.open(os.devnull, os.O_RDONLY)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in (null, output, output)]  # out of the way of 0 to 2
    for target, fd in enumerate(high):
        os.dup2(fd, target)
    os.closerange(3, max(os.sysconf("SC_OPEN_MAX"), 4096))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
    sys.stderr = open(2, "w", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115


def _limit(seconds: float, memory_mb: int, mapped: int) -> None:
    """Bound CPU time, address space beyond the interpreter's, file size, processes, descriptors; no core dumps."""
    for name, value in (
        (resource.RLIMIT_CPU, int(seconds) + 2),
        (resource.RLIMIT_AS, mapped + memory_mb * _MIB),
        (resource.RLIMIT_FSIZE, 64 * _MIB),
        (resource.RLIMIT_NPROC, 64),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def _print_error(error: BaseException) -> None:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != _FILENAME:
        frames = frames.tb_next
    try:
        _flush()
        traceback.print_exception(type(error), error, frames)
    except BaseException as again:  # an object whose __str__ raises, or no memory left to format with
        os.write(2, f"{type(error).__name__} (and {type(again).__name__} while printing it)\n".encode())


def _join_threads() -> None:
    threading: Any = sys.modules.get("threading")
    for thread in threading.enumerate() if threading else ():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed, or the reader is gone: nothing is left to tell
            continue
