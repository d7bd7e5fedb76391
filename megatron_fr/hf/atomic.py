"""A folder that appears whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from megatron_fr.checkpoint.locked_folder import LOCK_FILE, empty_folder, lock_folder, sync_path
from megatron_fr.errors import ModelError

#: What renameat2 answers where the file system or the kernel cannot exchange two folders (NFS, for one).
_NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_ATTEMPTS = 100
#: Waiting for the disk with each larger file would make a conversion several times as long as a copy.
_SYNCED_BYTES = 1 << 24


@contextmanager
def atomic_folder(out: str | Path, *sources: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Give an empty folder to write into; at the end it becomes ``out``, in one step where the file system can.

    It lies in ``.NAME.tmp`` beside ``out`` (``NAME``: that of ``out``), which is locked while it is written and goes
    at the end. When the body raises, ``out`` stays as it was. A process that is killed leaves ``.NAME.tmp``, which the
    next write to ``out`` removes, and never half of ``out``. Where two folders cannot be exchanged (NFS), a kill
    between two renames leaves the earlier ``out`` in ``.NAME.tmp/NAME.old``; the next write puts it back first.

    Small files and the names are forced to the disk; weight files are left to the system to write, as a copy leaves
    them. So after a power cut (not a kill) within the next half minute, weights may be missing from a folder that has
    its name: they are then shorter than their headers say, which every reader checks, or zeros, which only comparing
    them shows.

    Args:
        out: where nothing is, or an empty folder.
        sources: what the body reads; none of them may be ``out`` or in it.
        overwrite: a model folder or a checkpoint there is replaced, with whatever else it holds.

    Raises:
        ModelError: the place cannot be written to, another process is writing there, or it holds something that may
            not be replaced.
    """
    out = Path(out).resolve()  # a link stays, and what it leads to is replaced
    for source in sources:
        if Path(source).resolve().is_relative_to(out):
            raise ModelError(f"{out} would be replaced, and {source}, which is read, with it; choose another folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        around, lock = _locked(out.with_name(f".{out.name}.tmp"), out)
    except OSError as error:
        raise ModelError(f"{out} cannot be written: {error.strerror}; choose another folder") from error
    work, old = around / out.name, around / f"{out.name}.old"
    try:
        try:
            _restore(out, old)
            empty_folder(around)
            _check_replaceable(out, overwrite)
            work.mkdir()
        except OSError as error:
            raise ModelError(f"{out} cannot be written: {error.strerror}; choose another folder") from error
        yield work
        try:
            _sync_small(work)
            _replace(work, out, old)
            sync_path(out.parent)
        except OSError as error:
            raise ModelError(f"{out} cannot be replaced: {error.strerror}; choose another folder") from error
    finally:
        _remove(around, lock, out, old)


def _check_replaceable(out: Path, overwrite: bool) -> None:
    """What is there goes only when asked; what is neither kind of result is most likely a mistyped path."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ModelError(f"{out} is a file; choose a folder")
    held = sorted(path.name for path in out.iterdir())
    if held and not any((out / name).is_file() for name in ("config.json", ".metadata")):
        raise ModelError(f"{out} exists and holds neither a model nor a checkpoint; choose another folder or empty it")
    if held and not overwrite:
        more = f" and {len(held) - 1} more" if len(held) > 1 else ""
        raise ModelError(
            f"{out} exists and holds {held[0]}{more}; choose another folder, or replace it and all "
            "that it holds with --overwrite"
        )


def _locked(around: Path, out: Path) -> tuple[Path, IO[str] | None]:
    """The folder and its lock, which goes with the file's closing, also when the process is killed (None: no locks).

    Raises:
        ModelError: another process holds it.
        OSError: the folder cannot be written.
    """
    for _ in range(_ATTEMPTS):
        try:
            around.mkdir(exist_ok=True)
            lock = lock_folder(around)
        except (FileExistsError, FileNotFoundError):  # another writer's end removed the folder meanwhile
            if around.is_file():
                raise
            continue
        except BlockingIOError as error:
            raise ModelError(f"{out} is being written by another process; wait, or choose another folder") from error
        if lock is None or _is_at(lock, around / LOCK_FILE):
            return around, lock
        lock.close()  # as above, between opening and locking
    raise ModelError(f"{out} is being written by other processes; wait, or choose another folder")


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _restore(out: Path, old: Path) -> None:
    """Undo the first of the two renames of :func:`_replace`."""
    if old.exists() and not out.exists():
        os.rename(old, out)


def _remove(around: Path, lock: IO[str] | None, out: Path, old: Path) -> None:
    """Delete the folder as far as that goes; the rest is the next writer's."""
    with suppress(OSError):
        _restore(out, old)
        empty_folder(around)
    with suppress(OSError):
        (around / LOCK_FILE).unlink()
    if lock is not None:
        lock.close()  # before the folder goes: on NFS a deleted file that is open stays in it under another name
    with suppress(OSError):  # not empty: another writer has begun
        around.rmdir()


def _replace(work: Path, out: Path, old: Path) -> None:
    """Give ``work`` the name ``out``; what was there goes to where ``work`` was, or to ``old``."""
    if not out.exists():
        os.rename(work, out)
    elif not _exchange(work, out):
        os.rename(out, old)
        os.rename(work, out)


def _sync_small(folder: Path) -> None:
    """Force the folder to the disk, and what is in it but large files."""
    for path in (*folder.rglob("*"), folder):
        if path.is_dir() or path.stat().st_size <= _SYNCED_BYTES:
            sync_path(path)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two folders in one step; False where the system cannot.

    Raises:
        OSError: it can, and these two may not be.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(second))
