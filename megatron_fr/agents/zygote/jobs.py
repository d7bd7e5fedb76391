"""What a forked child does: run one piece of code, or call one function."""

from __future__ import annotations

import fcntl
import importlib
import json
import linecache
import os
import signal
import sys
import traceback
from typing import Any, NoReturn

import isolation  # beside this file

_FILENAME = "<tool>"


def become_child(output: int, result: int | None, folder: str | None) -> None:
    """Own session, no input, both outputs into one pipe, ``result`` as descriptor 3, every other one closed."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    keep = [null, output, output, *([] if result is None else [result])]
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in keep]  # out of the way of 0 to 3
    for target, fd in enumerate(high):
        os.dup2(fd, target, inheritable=target < 3)
    os.closerange(len(keep), max(os.sysconf("SC_OPEN_MAX"), 4096))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
    sys.stderr = open(2, "w", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
    if folder is not None:
        os.chdir(folder)
        os.environ.update(HOME=folder, TMPDIR=folder)


def run_code(code: str, timeout_s: float, memory_mb: int, uid: int) -> NoReturn:
    """Execute untrusted ``code`` as ``__main__`` under its limits; exit status 1 after an exception."""
    isolation.limit_resources(timeout_s, memory_mb)
    isolation.drop_privileges(uid)
    isolation.die_with_parent(signal.SIGKILL)
    linecache.cache[_FILENAME] = (len(code), None, code.splitlines(keepends=True), _FILENAME)
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    sys.argv = [_FILENAME]
    status = 0
    try:
        exec(compile(code, _FILENAME, "exec", dont_inherit=True), main.__dict__)
        _join_threads()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if status and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except BaseException as error:
        status = 1
        _print_error(error)
    _leave(status)


def call(function: str, arguments: dict[str, Any]) -> NoReturn:
    """Call ``module:name`` with JSON arguments; the answer goes to descriptor 3 as JSON."""
    isolation.die_with_parent(signal.SIGKILL)
    try:
        payload = json.dumps({"value": resolve(function)(**arguments)})
    except BaseException as error:
        traceback.print_exc()
        last = traceback.format_exception_only(error)[-1].strip()
        payload = json.dumps({"error": last})
    _flush()
    view = memoryview(payload.encode())
    while view:
        view = view[os.write(3, view) :]
    os._exit(0)


def resolve(function: str) -> Any:
    module, _, name = function.partition(":")
    target = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    return target


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


def _leave(status: int) -> NoReturn:
    _flush()
    os._exit(status & 0xFF)
