"""Folders of training checkpoints: names, what is complete, which one to go on from, which ones stay. No torch.

``output/training_state/update-000040/`` holds the tensors (``torch.distributed.checkpoint``), ``run.json`` (counters
and what of the configuration must not change), ``rollout.state`` (of the rollout service), ``hf/`` (the model's
configuration and tokenizer, for conversion) and, written last, ``manifest.json`` with the size of every other file. A
folder has its final name only when it is complete and on the disk; until then it is ``update-000040.tmp``.

Other names: ``update-000040.abandoned-1`` was newer than the one that a run went on from, and is for people to look at
or to rename back. ``update-000040.deleted`` is about to go. The trainer locks ``output/training_state.lock`` for its
whole life, so that what is unfinished beside it is a killed run's.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

from megatron_fr.errors import CheckpointError, UnreadableCheckpointError

FOLDER = "training_state"
LOCK_FILE = "training_state.lock"
MANIFEST_FILE = "manifest.json"
RUN_FILE = "run.json"
ROLLOUT_FILE = "rollout.state"
#: Folder in a checkpoint with the model's configuration, tokenizer and chat template.
HF_FILES = "hf"
_WORK, _DELETED = ".tmp", ".deleted"
#: What the kernel says of a file that is not there or is something else; anything else says nothing of its content.
_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
#: What flock answers on file systems that are mounted without it.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
#: What fsync answers where folders cannot be synced: there a rename is as durable as it gets.
_NO_FOLDER_SYNC = {errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.ENOTSUP}


@dataclass(frozen=True)
class RunRecord:
    """``run.json``.

    Attributes:
        update: batches consumed.
        version: of the weights.
        score: held-out reward of these weights, None where they were not evaluated.
        fixed: what of the configuration and the model must be the same to go on, by field name.
        trainer: counters that belong to the tensors (see ``checkpoint/io.py``).
    """

    update: int
    version: int
    score: float | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write ``run.json`` of ``folder``."""
        (folder / RUN_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_record(folder: Path) -> RunRecord:
    """Read the ``run.json`` of a checkpoint.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = folder / RUN_FILE
    try:
        values = json.loads(path.read_text())
        return RunRecord(**{f.name: values[f.name] for f in fields(RunRecord)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error


def folder_of(output: Path, update: int) -> Path:
    """Where the checkpoint after ``update`` is."""
    return output / FOLDER / f"update-{update:06d}"


def update_of(folder: Path) -> int:
    """The number in a final name."""
    return int(folder.name.removeprefix("update-"))


def all_checkpoints(output: Path) -> list[Path]:
    """Folders with a final name, newest first; not checked.

    Raises:
        CheckpointError: they cannot be listed, which does not mean that there are none.
    """
    return sorted(_matching(output, ""), key=update_of, reverse=True)


def check_sizes(folder: Path) -> RunRecord:
    """Compare the size of every file with the manifest.

    Returns:
        the checkpoint's ``run.json``.

    Raises:
        UnreadableCheckpointError: files cannot be looked at, which says nothing of what they hold.
        CheckpointError: the checkpoint is incomplete or damaged.
    """
    with _explained(MANIFEST_FILE):
        text = (folder / MANIFEST_FILE).read_bytes()
    try:
        sizes = {str(name): int(entry["bytes"]) for name, entry in json.loads(text)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST_FILE} is damaged: {error!r}") from error
    for name, expected in sizes.items():
        with _explained(name):
            size = (folder / name).stat().st_size
        if size != expected:
            raise CheckpointError(f"{name} has {size} bytes, expected {expected}")
    return read_record(folder)


def find_damage(folder: Path) -> str | None:
    """Why a checkpoint cannot be used, or None: every file of its manifest has its size."""
    try:
        check_sizes(folder)
    except CheckpointError as error:
        return str(error)
    return None


def newest_usable(output: Path, say: Callable[[str], None] = print) -> Path | None:
    """Find the newest checkpoint that is complete, None where there is none; what is skipped is said.

    A checkpoint that a killed run only had to name gets its name first.

    Raises:
        CheckpointError: the folder cannot be listed, or it holds checkpoints and none is usable. To begin again at
            update 0 then is for a person to decide.
    """
    for work in _matching(output, _WORK):
        try:
            _name_if_complete(work, say)
        except (UnreadableCheckpointError, OSError) as error:
            say(f"left {work} alone: {error}")
    skipped = []
    for folder in all_checkpoints(output):
        reason = find_damage(folder)
        if reason is None:
            return folder
        say(f"skipped checkpoint {folder}: {reason}")
        skipped.append(f"{folder}: {reason}")
    if not skipped:
        return None
    raise CheckpointError(
        "no training checkpoint can be gone on from (" + "; ".join(skipped) + "); repair one of them, or start anew "
        "with checkpoint.resume=never, which keeps them under another name"
    )


def find_resumed(output: Path, given: str, say: Callable[[str], None] = print) -> Path | None:
    """Find the checkpoint to go on from, None to start anew.

    Args:
        given: a folder; ``auto`` for the newest usable one in ``output``; ``never`` for none.

    Raises:
        CheckpointError: the folder is damaged or cannot be read; see also :func:`newest_usable`.
    """
    if given == "never":
        return None
    if given == "auto":
        return newest_usable(output, say)
    if (reason := find_damage(Path(given))) is not None:
        raise CheckpointError(f"checkpoint {given} cannot be gone on from: {reason}; choose another one")
    return Path(given)


def lock_output(output: Path) -> IO[str] | None:
    """Lock a run's training checkpoints until the file is closed or the process ends; None: no locks here.

    Raises:
        CheckpointError: another process holds the lock, or ``output`` cannot be written.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        file = (output / LOCK_FILE).open("w")
    except OSError as error:
        raise unwritable(output / FOLDER, str(error.strerror)) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno in _NO_LOCKS:
            return None
        raise CheckpointError(
            f"{output / FOLDER} is being written by another run; give each run its own output"
        ) from error
    return file


def remove_unfinished(output: Path, say: Callable[[str], None] = print) -> None:
    """Delete what killed runs left, and say so. The caller holds the lock.

    Raises:
        CheckpointError: the folder cannot be listed.
    """
    for left in _matching(output, _WORK) + _matching(output, _DELETED):
        try:
            if left.suffix == _DELETED or not _name_if_complete(left, say):
                shutil.rmtree(left)
                say(f"removed {left}, which an earlier run left behind")
        except (UnreadableCheckpointError, OSError) as error:
            say(f"left {left} alone: {error}")


def work_folder(output: Path, update: int) -> Path:
    """Make an empty folder to write the checkpoint after ``update`` into.

    Raises:
        OSError: it cannot be made.
    """
    work = folder_of(output, update).with_suffix(_WORK)
    if work.exists():
        shutil.rmtree(work)
    work.mkdir(parents=True)
    return work


def complete(work: Path, written: Mapping[str, int] | None = None) -> Path:
    """Write the manifest, bring everything to the disk and give the folder its final name.

    Args:
        written: sizes in bytes of files that other machines wrote. They count even if this machine does not see them
            yet.

    Raises:
        OSError: the disk is full or gone; the folder keeps its temporary name.
    """
    inside = sorted(work.rglob("*"))
    files = [path for path in inside if path.is_file()]
    sizes = {str(path.relative_to(work)): path.stat().st_size for path in files} | dict(written or {})
    text = json.dumps({"files": {name: {"bytes": size} for name, size in sorted(sizes.items())}}, indent=2)
    for path in files:
        _sync(path)
    manifest = work / MANIFEST_FILE
    manifest.write_text(text)
    for path in (manifest, *(path for path in inside if path.is_dir()), work):
        _sync(path)
    return _give_name(work)


def set_newer_aside(output: Path, update: int) -> list[Path]:
    """Rename the checkpoints after ``update``: a run that goes on from there makes its own, and must not mix with them.

    Returns:
        their new paths.

    Raises:
        CheckpointError: one cannot be renamed.
    """
    newer = [folder for folder in all_checkpoints(output) if update_of(folder) > update]
    try:
        return [_rename_aside(folder, "abandoned") for folder in newer]
    except OSError as error:
        raise CheckpointError(
            f"{error.filename}: checkpoints after update {update}, which this run goes on from, have to be renamed and "
            f"cannot be ({error.strerror}); make the folder writable, or move them away"
        ) from error


def set_aside(output: Path) -> Path | None:
    """Rename what an earlier run into this folder left, so that a new beginning does not mix with it.

    Raises:
        CheckpointError: it cannot be renamed.
    """
    root = output / FOLDER
    try:
        return _rename_aside(root, "old") if root.is_dir() and any(root.iterdir()) else None
    except OSError as error:
        raise CheckpointError(
            f"{root} of an earlier run cannot be renamed ({error.strerror}); make {output} writable, or set output to "
            "another folder"
        ) from error


def retain(output: Path, written: Path, *, last: int, best: int) -> list[str]:
    """Delete all but the ``last`` newest and the ``best`` with the highest score (the newer of equals).

    Damaged checkpoints do not count towards either. Unreadable ones stay and do not count.

    Args:
        written: the one just completed; it stays, and later updates are not touched.

    Returns:
        one line for each that should go and cannot be deleted, or cannot be read.
    """
    records = {written: read_record(written)}
    doomed: list[Path] = []
    problems: list[str] = []
    for folder in all_checkpoints(output):
        if update_of(folder) < update_of(written):
            try:
                records[folder] = check_sizes(folder)
            except UnreadableCheckpointError as error:
                problems.append(f"{folder} stays: {error}")
            except CheckpointError:
                doomed.append(folder)
    scored = sorted(((r.score, r.update, f) for f, r in records.items() if r.score is not None), reverse=True)
    kept = {*list(records)[:last], *(folder for _, _, folder in scored[:best])}
    for folder in (*doomed, *records):
        if folder not in kept:
            going = folder.with_suffix(_DELETED)  # a crash half-way leaves no folder that looks complete
            try:
                os.rename(folder, going)
                shutil.rmtree(going)
            except OSError as error:
                problems.append(f"{folder} should go and cannot be deleted: {error.strerror}")
    return problems


def unwritable(folder: Path, reason: str) -> CheckpointError:
    """The error of a checkpoint that could not be written."""
    return CheckpointError(
        f"checkpoint {folder} could not be written ({reason}); free space or set output to another folder. Earlier "
        "checkpoints are untouched: the same command goes on from the newest one"
    )


def _matching(output: Path, suffix: str) -> list[Path]:
    root, name = output / FOLDER, re.compile(rf"update-\d{{6,}}{re.escape(suffix)}")
    try:
        return sorted(p for p in root.iterdir() if name.fullmatch(p.name) and p.is_dir()) if root.is_dir() else []
    except OSError as error:
        raise CheckpointError(
            f"training checkpoints in {root} cannot be listed ({error.strerror}): mend the access to that folder, or "
            "start anew in another output"
        ) from error


def _name_if_complete(work: Path, say: Callable[[str], None]) -> bool:
    try:
        check_sizes(work)
    except UnreadableCheckpointError:
        raise
    except CheckpointError:
        return False
    say(f"named {_give_name(work)}, which an earlier run was killed before naming")
    return True


def _give_name(work: Path) -> Path:
    """Give a complete folder its final name; an older folder of that name gets another one."""
    final = work.with_suffix("")
    if final.exists():
        _rename_aside(final, "abandoned")
    try:
        os.rename(work, final)
    except FileNotFoundError:
        if not final.exists():  # else another start of the run has named it meanwhile
            raise
    _sync(final.parent)
    return final


def _rename_aside(folder: Path, why: str) -> Path:
    """Give a folder a name that nothing goes on from; returns its new path."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.{why}-{number}")).exists():
        number += 1
    os.rename(folder, target)
    return target


def _sync(path: Path) -> None:
    """Bring a file, or a folder's names where its file system can, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in _NO_FOLDER_SYNC):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NOT_THERE:
            raise CheckpointError(f"{name} is missing") from error
        raise UnreadableCheckpointError(
            f"{name} cannot be read now ({error.strerror}), which is no sign of damage: mend the access to it"
        ) from error
