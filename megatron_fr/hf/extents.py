"""Ranges of bytes in open files, copied from file to file: what needs no change never becomes a tensor."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fr.errors import ModelError

_BUFFER = 1 << 18  # stays in a core's own cache
# The kernel reads or writes at most 2 GiB at a time.
_MAX_TRANSFER = 1 << 30
#: Said of files that the kernel does not copy.
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Extent:
    """``length`` bytes at ``offset`` of an open file; ``tensor`` is theirs, for messages."""

    path: Path
    descriptor: int
    offset: int
    length: int
    tensor: str

    def read_into(self, buffer: memoryview, start: int = 0) -> None:
        """Fill ``buffer`` with the range's bytes from ``start`` on; it must not be longer than what is left of them.

        Raises:
            ModelError: names the file and the tensor that could not be read.
        """
        position = self.offset + start
        while buffer:
            try:
                count = os.preadv(self.descriptor, [buffer[:_MAX_TRANSFER]], position)
            except OSError as error:
                raise ModelError(f"{self.path}: tensor {self.tensor!r} cannot be read ({error.strerror})") from error
            if count == 0:
                raise ModelError(f"{self.path}: tensor {self.tensor!r} ends early; the file was cut while it was read")
            buffer, position = buffer[count:], position + count


class ExtentReader(io.RawIOBase):
    """The range as a file of its own, for what wants one; bytes outside of it cannot be reached.

    (torch's ``_ReaderView`` lets its reader look for the end mark of a damaged archive in what lies before it.)

    Attributes:
        extent: the range.
        failure: why bytes could not be read; torch raises another error in its place.
    """

    def __init__(self, extent: Extent) -> None:
        self.extent, self._position = extent, 0
        self.failure: ModelError | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.extent.length}[whence]
        if position < 0:
            raise ValueError(f"position {position} is before the first byte")
        self._position = position
        return position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        count = max(0, min(len(buffer), self.extent.length - self._position))
        try:
            self.extent.read_into(memoryview(buffer)[:count], self._position)
        except ModelError as error:
            self.failure = error
            raise
        self._position += count
        return count


def reason(error: OSError) -> str:
    """What the system said, and what helps where it is not the disk that is to be looked after."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{error.strerror}; use fewer threads, or raise the limit (ulimit -n)"
    return str(error.strerror)


@contextmanager
def writing(path: Path, what: str) -> Iterator[None]:
    """Make a failure to write ``what`` of the file a :class:`ModelError` that names both."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"{path}: {what} cannot be written: {reason(error)}") from error


def write_all(file: io.FileIO, data: bytes | memoryview) -> None:
    """Write every byte to an unbuffered file.

    Raises:
        OSError: the disk is full, or the file cannot be written.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest[:_MAX_TRANSFER]) :]


def copy_extents(extents: Iterable[Extent], file: io.FileIO) -> int:
    """Append the bytes of the ranges, in order, to an unbuffered file; returns how many they were.

    The kernel copies them, as in ``shutil``: a process's own large writes were up to three times slower where a virtual
    machine had given the page cache's memory back to its host (``benchmarks/convert.py``).

    Raises:
        ModelError: names the file and the tensor that could not be read.
        OSError: the disk is full, or the file cannot be written.
    """
    total = 0
    for extent in extents:
        done = 0
        while done < extent.length and (count := _send(extent, done, file)):
            done += count
        # What is left was refused by a file system that cannot, or is not there: reading will tell.
        _read_and_write(extent, done, file)
        total += extent.length
    return total


def _read_and_write(extent: Extent, start: int, file: io.FileIO) -> None:
    buffer = memoryview(bytearray(min(_BUFFER, extent.length - start)))
    while start < extent.length:
        piece = buffer[: extent.length - start]
        extent.read_into(piece, start)
        write_all(file, piece)
        start += len(piece)


def _send(extent: Extent, start: int, file: io.FileIO) -> int:
    """How many bytes of the range, from ``start`` on, the kernel has copied; 0: it cannot, or the file ends there.

    Raises:
        ModelError: they cannot be read.
        OSError: they cannot be written.
    """
    length = min(extent.length - start, _MAX_TRANSFER)
    try:
        return os.sendfile(file.fileno(), extent.descriptor, extent.offset + start, length)
    except OSError as error:
        if error.errno in _NOT_SUPPORTED:
            return 0
        # Of which file, it does not say. Tried again it might pass: some file systems report a failed write only once.
        extent.read_into(memoryview(bytearray(min(_BUFFER, length))), start)
        raise
