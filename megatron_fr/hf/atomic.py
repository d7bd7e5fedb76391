"""A folder that appears whole or not at all."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from megatron_fr.errors import ModelError

#: What fsync answers where folders cannot be synced: there a rename is as durable as it gets.
_NO_FOLDER_SYNC = {errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.ENOTSUP}


@contextmanager
def atomic_folder(out: str | Path, *sources: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Give an empty folder to write into; at the end its files are on the disk and it becomes ``out``.

    The folder is ``.NAME.tmp`` beside ``out``. When the body raises, it goes and ``out`` stays as it was. A killed
    process leaves it to the next writer, which removes it. While ``out`` is replaced, the earlier one is ``.NAME.old``;
    after a kill at that moment the next writer renames it back.

    Args:
        sources: what the body reads; none of them may be ``out`` or in it.
        overwrite: replace a model folder or a checkpoint at ``out``, with all that it holds.

    Raises:
        ModelError: ``out`` cannot be written, another process writes it, or it holds what may not be replaced.
    """
    out = Path(out).resolve()  # a link stays, and its target is replaced
    for source in sources:
        if Path(source).resolve().is_relative_to(out):
            raise ModelError(f"{out} would be replaced, and {source}, which is read, with it; choose another folder")
    work, old = out.with_name(f".{out.name}.tmp"), out.with_name(f".{out.name}.old")
    try:
        work.mkdir(parents=True, exist_ok=True)
        with _locked(work, out):
            try:
                _restore(out, old)
                _check_replaceable(out, overwrite)
                shutil.rmtree(old, ignore_errors=True)
                for path in work.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                yield work
                for path in (*work.rglob("*"), work):
                    sync_path(path)
                if out.exists():
                    os.rename(out, old)
                os.rename(work, out)
                sync_path(out.parent)
            finally:
                _restore(out, old)
                shutil.rmtree(old, ignore_errors=True)
                shutil.rmtree(work, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{out} could not be written: {error}; free space or choose another folder") from error


def _restore(out: Path, old: Path) -> None:
    if old.exists() and not out.exists():
        os.rename(old, out)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync_path(path: Path) -> None:
    """Bring a file, or a folder's names where its file system can, to the disk; an OSError if it is full or gone."""
    with _opened(path) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if not (path.is_dir() and error.errno in _NO_FOLDER_SYNC):
                raise


@contextmanager
def _locked(folder: Path, out: Path) -> Iterator[None]:
    """Hold the folder's lock, which goes with the process; on a file system without locks hold none."""
    with _opened(folder) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ModelError(f"another process writes {out}; wait, or choose another folder") from error
        except OSError as error:
            print(f"{folder} cannot be locked ({error.strerror}): start one conversion to it at a time", flush=True)
        yield


def _check_replaceable(out: Path, overwrite: bool) -> None:
    """Accept nothing, an empty folder and, when asked, a result; anything else is most likely a mistyped path."""
    if out.exists() and not out.is_dir():
        raise ModelError(f"{out} is a file; choose a folder")
    held = sorted(path.name for path in out.iterdir()) if out.exists() else []
    if held and not {"config.json", ".metadata"} & set(held):
        raise ModelError(f"{out} exists and holds neither a model nor a checkpoint; choose another folder or empty it")
    if held and not overwrite:
        raise ModelError(
            f"{out} exists and holds {held[0]}; choose another folder, or replace it and all that it holds with "
            "--overwrite"
        )
