"""Folders of training checkpoints: names, manifests, which one to go on from, which ones to keep. No torch.

``output/training_state/update-000040/`` holds Megatron's files (``dist_checkpointing``, torch_dist), ``run.json``
(counters and what of the configuration must not change), ``rollout.state`` (of the rollout service), ``hf/`` (the
model's configuration and tokenizer, for conversion) and, written last, ``manifest.json`` with the size and SHA-256 of
every other file. A folder has its final name only when it is complete. Until then it is ``update-000040.tmp``, and the
process that writes it holds a lock in it, by which a later start tells a left-over from another run's folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

from megatron_fr.errors import CheckpointError

FOLDER = "training_state"
RUN_FILE = "run.json"
ROLLOUT_FILE = "rollout.state"
MANIFEST_FILE = "manifest.json"
_NAME = re.compile(r"^update-(\d{6,})$")
_WORK_SUFFIX = ".tmp"
_WORK_NAME = re.compile(r"^update-\d{6,}\.tmp$")
_LOCK_FILE = ".writing"
#: What flock answers on file systems that are mounted without it.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}


@dataclass(frozen=True)
class RunRecord:
    """``run.json``.

    Attributes:
        update: batches consumed.
        version: of the weights.
        score: ``eval/reward`` of these weights, None where they were not evaluated.
        fixed: what of the configuration and the model must be the same to go on, by field name.
        trainer: counters that belong to the tensors (see ``trainer/checkpoint_io.py``).
    """

    update: int
    version: int
    score: float | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """As ``run.json`` of ``folder``."""
        (folder / RUN_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_record(folder: Path) -> RunRecord:
    """The ``run.json`` of a checkpoint.

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


def work_folder(output: Path, update: int) -> tuple[Path, IO[str] | None]:
    """A folder to write that checkpoint into, and the lock to keep open while it is written (None: no locks here).

    It holds nothing but the lock; what an earlier attempt left in it is removed.

    Raises:
        CheckpointError: another process is writing it.
        OSError: it cannot be made.
    """
    work = folder_of(output, update).with_suffix(_WORK_SUFFIX)
    work.mkdir(parents=True, exist_ok=True)
    lock = _try_lock(work)
    try:
        _empty(work)
    except OSError:
        if lock is not None:
            lock.close()
        raise
    return work, lock


def remove_unfinished(output: Path, say: Callable[[str], None] = print) -> None:
    """Delete what killed saves of earlier runs left; a folder that a live process writes stays. Both are said."""
    root = output / FOLDER
    for work in sorted(p for p in root.iterdir() if _WORK_NAME.match(p.name)) if root.is_dir() else []:
        try:
            lock = _try_lock(work)
            if lock is None:
                say(f"left {work} alone: without file locks here, it may be another run's; delete it if it is not")
                continue
            with lock:
                _empty(work)
            # Without the lock: NFS keeps a deleted file that is open under another name, and the folder with it.
            shutil.rmtree(work)
            say(f"removed {work}, an unfinished checkpoint of an earlier run")
        except (CheckpointError, OSError) as error:
            say(f"left {work} alone: {error}")


def _empty(work: Path) -> None:
    """Delete all but the lock."""
    for path in work.iterdir():
        if path.name == _LOCK_FILE:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _try_lock(work: Path) -> IO[str] | None:
    """The lock of a folder; it goes with the file's closing, also when the process is killed. None: no locks here.

    Raises:
        CheckpointError: another process holds it.
        OSError: the folder cannot be written.
    """
    file = (work / _LOCK_FILE).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            raise CheckpointError(f"{work} is being written by another run; give each run its own output") from error
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return file


def complete(work: Path) -> Path:
    """Write the manifest and give the folder its final name.

    Raises:
        OSError: the disk is full or gone; the folder keeps its temporary name.
    """
    files = sorted(path for path in work.rglob("*") if path.is_file() and path.name != _LOCK_FILE)
    entries = dict(zip((str(p.relative_to(work)) for p in files), _in_threads(_describe, files), strict=True))
    manifest = work / MANIFEST_FILE
    with manifest.open("w") as file:
        json.dump({"files": entries}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    final = work.with_suffix("")
    if final.exists():  # the same update again, after an older or damaged one was gone on from
        shutil.rmtree(final)
    os.rename(work, final)
    _sync_folder(final.parent)
    with contextlib.suppress(OSError):  # nothing looks at it in a folder with a final name
        (final / _LOCK_FILE).unlink(missing_ok=True)
    return final


def problem(folder: Path) -> str | None:
    """Why a checkpoint cannot be used, or None: every file of its manifest has its size and checksum."""
    path = folder / MANIFEST_FILE
    try:
        entries: dict[str, dict[str, Any]] = json.loads(path.read_text())["files"]
        for name, entry in entries.items():
            size = (folder / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes, expected {entry['bytes']}"
        names = list(entries)
        for name, found in zip(names, _in_threads(_describe, [folder / n for n in names]), strict=True):
            if found["sha256"] != entries[name]["sha256"]:
                return f"{name} has another checksum than {MANIFEST_FILE} says"
        read_record(folder)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST_FILE} or a file that it names cannot be read: {error!r}"
    except CheckpointError as error:
        return str(error)
    return None


def all_checkpoints(output: Path) -> list[Path]:
    """Folders with a final name, newest first; not checked."""
    root = output / FOLDER
    found = [p for p in root.iterdir() if _NAME.match(p.name) and p.is_dir()] if root.is_dir() else []
    return sorted(found, key=_update_of, reverse=True)


def newest_usable(output: Path, say: Callable[[str], None] = print) -> Path | None:
    """The newest checkpoint that is complete and undamaged; what is skipped is said with the reason."""
    for folder in all_checkpoints(output):
        reason = problem(folder)
        if reason is None:
            return folder
        say(f"skipped checkpoint {folder}: {reason}")
    return None


def retain(output: Path, *, last: int, best: int) -> list[str]:
    """Delete all but the ``last`` newest and the ``best`` with the highest score (the newer of equals).

    Returns:
        for each that could not be deleted, why, in one line.
    """
    problems: list[str] = []
    folders = all_checkpoints(output)
    scored: list[tuple[float, int, Path]] = []
    for folder in folders:
        try:
            record = read_record(folder)
        except CheckpointError:
            continue  # damaged: neither best nor worth keeping beyond the newest
        if record.score is not None:
            scored.append((record.score, record.update, folder))
    kept = {*folders[:last], *(folder for _, _, folder in sorted(scored, reverse=True)[:best])}
    for folder in folders:
        if folder not in kept:
            doomed = folder.with_suffix(_WORK_SUFFIX)  # a crash half-way leaves no folder that looks complete
            try:
                os.rename(folder, doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                problems.append(f"{folder} should go and cannot be deleted: {error.strerror}")
    return problems


def set_aside(output: Path) -> Path | None:
    """Rename what an earlier run into this folder left, so that a new beginning does not mix with it."""
    root = output / FOLDER
    if not root.is_dir() or not any(root.iterdir()):
        return None
    number = 1
    while (target := root.with_name(f"{FOLDER}.old-{number}")).exists():
        number += 1
    os.rename(root, target)
    return target


def check_fixed(folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with another model, batch size and the like.

    Raises:
        CheckpointError: names each field with both values.
    """
    changed = [
        f"{name}: {saved.get(name)!r} then, {value!r} now" for name, value in now.items() if saved.get(name) != value
    ]
    if changed:
        raise CheckpointError(
            f"checkpoint {folder} is of another run ({'; '.join(changed)}); undo the change, choose another output "
            "folder, or start anew with checkpoint.resume=never"
        )


def _update_of(folder: Path) -> int:
    match = _NAME.match(folder.name)
    assert match is not None
    return int(match[1])


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _in_threads(work: Callable[[Path], dict[str, Any]], paths: list[Path]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        return list(pool.map(work, paths))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
