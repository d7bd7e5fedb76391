"""What NFS does when a file that is open is deleted: it goes on under another name until it is closed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def silly_rename() -> Iterator[None]:
    """Within it ``os.unlink`` renames a file that this process has open to ``.nfs...``, which cannot be deleted then.

    Unlike on NFS, such a file does not go when it is closed.
    """
    unlink = os.unlink

    def on_nfs(path: Any, *, dir_fd: int | None = None) -> None:
        status = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        if (status.st_dev, status.st_ino) not in _open_files():
            unlink(path, dir_fd=dir_fd)
            return
        folder, name = os.path.split(os.fspath(path))
        if name.startswith(".nfs"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), name)
        os.rename(path, os.path.join(folder, f".nfs{status.st_ino:024x}"), src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    with mock.patch("os.unlink", on_nfs):
        yield


def _open_files() -> set[tuple[int, int]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:  # that of the listing itself
            continue
        found.add((status.st_dev, status.st_ino))
    return found
