"""Folders that are written under a temporary name: the lock that says so, emptying them, getting them to the disk."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import IO

LOCK_FILE = ".writing"
#: What flock answers on file systems that are mounted without it.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
#: What fsync answers where folders cannot be synced: there a rename is as durable as it gets.
_NO_FOLDER_SYNC = {errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.ENOTSUP}


def lock_folder(folder: Path) -> IO[str] | None:
    """The lock of a folder; it goes with the file's closing, also when the process is killed. None: no locks here.

    Raises:
        BlockingIOError: another process holds it.
        OSError: the folder cannot be written.
    """
    file = (folder / LOCK_FILE).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return file


def empty_folder(folder: Path) -> None:
    """Delete all but the lock.

    Raises:
        OSError: something cannot be deleted.
    """
    for path in folder.iterdir():
        if path.name == LOCK_FILE:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def sync_path(path: Path) -> None:
    """Bring a file, or a folder's names where its file system can, to the disk.

    Raises:
        OSError: it cannot be opened, or the disk is full or gone.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in _NO_FOLDER_SYNC):
            raise
    finally:
        os.close(descriptor)
