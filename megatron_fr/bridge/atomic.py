"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_fr.errors import ModelError


@contextmanager
def atomic_folder(out: str | Path, *sources: str | Path) -> Iterator[Path]:
    """Give a temporary folder beside ``out``; rename it to ``out`` at the end, replacing what was there.

    When the body raises, the temporary folder goes and ``out`` stays as it was. A process that is killed leaves the
    temporary folder (its name begins with a dot), never half of ``out``.

    Args:
        out: a model folder, a checkpoint or an empty folder there is replaced; anything else is not.
        sources: what the body reads; none of them may be ``out`` or in it.

    Raises:
        ModelError: the place cannot be written to, or holds something else than an earlier result.
    """
    out = Path(out).resolve()  # a link stays, and what it leads to is replaced
    for source in sources:
        if Path(source).resolve().is_relative_to(out):
            raise ModelError(f"{out} would be replaced, and {source}, which is read, with it; choose another folder")
    _check_replaceable(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise ModelError(f"{out} cannot be written: {error.strerror}; choose another folder") from error
    try:
        yield work
        work.chmod(0o755)
        try:
            _replace(work, out)
        except OSError as error:
            raise ModelError(f"{out} cannot be replaced: {error.strerror}; choose another folder") from error
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _check_replaceable(out: Path) -> None:
    """A result of an earlier run may go; a folder that holds other things is most likely a mistyped path."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ModelError(f"{out} is a file; choose a folder")
    ours = any((out / name).is_file() for name in ("config.json", ".metadata"))
    if not ours and any(out.iterdir()):
        raise ModelError(f"{out} exists and holds neither a model nor a checkpoint; choose another folder or empty it")


def _replace(work: Path, out: Path) -> None:
    """Rename ``work`` to ``out``; what was there goes last, so that one of the two always exists."""
    old = work.with_name(work.name + ".old")
    if out.exists():
        os.rename(out, old)
    try:
        os.rename(work, out)
    except OSError:
        if old.exists():
            os.rename(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)
