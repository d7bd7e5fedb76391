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
def atomic_folder(out: str | Path) -> Iterator[Path]:
    """Give a temporary folder beside ``out``; rename it to ``out`` at the end, replacing what was there.

    When the body raises, the temporary folder goes and ``out`` stays as it was. A process that is killed leaves the
    temporary folder (its name begins with a dot), never half of ``out``.

    Raises:
        ModelError: the place cannot be written to.
    """
    out = Path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise ModelError(f"{out} cannot be written: {error.strerror}; choose another folder") from error
    try:
        yield work
        work.chmod(0o755)
        _replace(work, out)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _replace(work: Path, out: Path) -> None:
    """Rename ``work`` to ``out``; what was there goes last, so that one of the two always exists."""
    old = work.with_name(work.name + ".old")
    if out.exists():
        os.rename(out, old)
    os.rename(work, out)
    shutil.rmtree(old, ignore_errors=True)
