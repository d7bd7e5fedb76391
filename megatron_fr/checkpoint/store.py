"""Folders of training checkpoints: names, manifests, which one to go on from, which ones to keep. No torch.

``output/training_state/update-000040/`` holds Megatron's files (``dist_checkpointing``, torch_dist), ``run.json``
(counters and what of the configuration must not change), ``rollout.state`` (of the rollout service), ``hf/`` (the
model's configuration and tokenizer, for conversion) and, written last, ``manifest.json`` with the size and SHA-256 of
every other file. A folder has its final name only when it is complete. Until then it is ``update-000040.tmp``, and the
process that writes it holds a lock in it, by which a later start tells a left-over from another run's folder.

Other names: ``update-000040.abandoned-1`` was newer than the one that a run went on from, and is for people to look at
or to rename back; ``update-000040.deleted`` is on its way out.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

from megatron_fr.checkpoint.locked_folder import LOCK_FILE, empty_folder, lock_folder, sync_path
from megatron_fr.checkpoint.manifest import (
    MANIFEST_FILE,
    RUN_FILE,
    Entry,
    SumCheck,
    announce,
    check_sizes,
    write_manifest,
)
from megatron_fr.errors import CheckpointError, UnreadableCheckpointError

FOLDER = "training_state"
ROLLOUT_FILE = "rollout.state"
_NAME = re.compile(r"^update-(\d{6,})$")
_WORK_SUFFIX = ".tmp"
_WORK_NAME = re.compile(r"^update-\d{6,}\.tmp$")
DELETED_SUFFIX = ".deleted"
_DELETED_NAME = re.compile(r"^update-\d{6,}\.deleted$")


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
        empty_folder(work)
    except OSError:
        if lock is not None:
            lock.close()
        raise
    return work, lock


def remove_unfinished(output: Path, say: Callable[[str], None] = print) -> None:
    """Deal with what killed runs left, and say so: a save that was through but for its name gets that, others go.

    A folder that a live process writes stays.
    """
    try:
        works, deleted = _matching(output, _WORK_NAME), _matching(output, _DELETED_NAME)
    except OSError as error:
        say(f"left unfinished checkpoints in {output / FOLDER} alone: {error}")
        return
    for work in works:
        try:
            lock = _try_lock(work)
            if lock is None:
                say(f"left {work} alone: without file locks here, it may be another run's; delete it if it is not")
                continue
            with lock:
                if _name_if_complete(work, say):
                    continue
                empty_folder(work)
            # Without the lock: NFS keeps a deleted file that is open under another name, and the folder with it.
            shutil.rmtree(work)
            say(f"removed {work}, an unfinished checkpoint of an earlier run")
        except (CheckpointError, OSError) as error:
            say(f"left {work} alone: {error}")
    for folder in deleted:
        try:
            shutil.rmtree(folder)
            say(f"removed {folder}, which an earlier run was about to delete")
        except OSError as error:
            say(f"left {folder} alone: {error}")


def _name_if_complete(work: Path, say: Callable[[str], None]) -> bool:
    """Give a folder its final name if only that is missing; its lock is held."""
    try:
        check_sizes(work)
    except UnreadableCheckpointError:
        raise
    except CheckpointError:
        return False
    say(f"named {_give_name(work)}, which an earlier run was killed before naming")
    return True


def _name_complete(output: Path, say: Callable[[str], None]) -> None:
    for work in _matching(output, _WORK_NAME):
        if not (work / MANIFEST_FILE).exists():
            continue
        try:
            lock = _try_lock(work)
            if lock is not None:
                with lock:
                    _name_if_complete(work, say)
        except (CheckpointError, OSError) as error:
            say(f"left {work} alone: {error}")


def _try_lock(work: Path) -> IO[str] | None:
    """The lock of a folder; it goes with the file's closing, also when the process is killed. None: no locks here.

    Raises:
        CheckpointError: another process holds it.
        OSError: the folder cannot be written.
    """
    try:
        return lock_folder(work)
    except BlockingIOError as error:
        raise CheckpointError(f"{work} is being written by another run; give each run its own output") from error


def complete(work: Path, known: Mapping[str, Entry] | None = None) -> Path:
    """Write the manifest, bring everything to the disk and give the folder its final name.

    Args:
        known: manifest entries of files that their writers have described and brought to the disk.

    Raises:
        OSError: the disk is full or gone; the folder keeps its temporary name.
    """
    write_manifest(work, known or {}, ignored=LOCK_FILE)
    return _give_name(work)


def _give_name(work: Path) -> Path:
    """At every moment one complete folder of this update exists, under its final name or one that gets it again."""
    final = work.with_suffix("")
    replaced = rename_aside(final) if final.exists() else None
    try:
        os.rename(work, final)
    except OSError:
        if replaced is not None:
            os.rename(replaced, final)
        raise
    sync_path(final.parent)
    with contextlib.suppress(OSError):  # nothing looks at it in a folder with a final name
        (final / LOCK_FILE).unlink(missing_ok=True)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)  # what stays of it has a name that nothing goes on from
    return final


def rename_aside(folder: Path) -> Path:
    """Give a folder a name that nothing goes on from; returns its new path.

    Raises:
        OSError: it cannot be renamed.
    """
    number = 1
    while (target := folder.with_name(f"{folder.name}.abandoned-{number}")).exists():
        number += 1
    os.rename(folder, target)
    return target


def problem(
    folder: Path, stop: Callable[[], bool] = lambda: False, say: Callable[[str], None] = lambda _: None
) -> str | None:
    """Why a checkpoint cannot be used, or None: every file of its manifest has its size and checksum.

    Args:
        stop: ends the reading early, when the answer no longer matters.
        say: told where there is much to read.
    """
    try:
        entries = check_sizes(folder)
        read_record(folder)
        announce(folder, entries, say)
        with SumCheck(folder, entries) as sums:
            while not sums.through(within_s=0.2):
                if stop():
                    return "the check was interrupted"
    except CheckpointError as error:
        return str(error)
    return None


def all_checkpoints(output: Path) -> list[Path]:
    """Folders with a final name, newest first; not checked.

    Raises:
        OSError: they cannot be listed.
    """
    return sorted(_matching(output, _NAME), key=update_of, reverse=True)


def candidates(output: Path, say: Callable[[str], None] = print) -> list[Path]:
    """:func:`all_checkpoints`, after naming those that an earlier run was killed before naming.

    Raises:
        CheckpointError: they cannot be listed, which does not mean that there are none.
    """
    try:
        _name_complete(output, say)
        return all_checkpoints(output)
    except OSError as error:
        raise CheckpointError(
            f"training checkpoints in {output / FOLDER} cannot be listed ({error.strerror}): mend the access to that "
            "folder, or start anew in another output"
        ) from error


def newest_usable(
    output: Path, say: Callable[[str], None] = print, stop: Callable[[], bool] = lambda: False
) -> Path | None:
    """The newest checkpoint that is complete and undamaged, None where there is none; what is skipped is said.

    Args:
        stop: ends the reading early; the answer then is None.

    Raises:
        CheckpointError: see :func:`candidates` and :func:`first_usable`.
    """

    def check(folder: Path) -> str | None:
        reason = problem(folder, stop, say)
        return None if stop() else reason

    found = first_usable(candidates(output, say), say, check)
    return None if stop() else found


def first_usable(
    folders: Iterable[Path], say: Callable[[str], None], check: Callable[[Path], str | None]
) -> Path | None:
    """The first one for which ``check`` gives no reason against it, None where there are none.

    Raises:
        CheckpointError: there are some and none is usable; names each with its reason. To begin again at update 0
            then is for a person to decide.
    """
    skipped = []
    for folder in folders:
        reason = check(folder)
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


def set_aside(output: Path) -> Path | None:
    """Rename what an earlier run into this folder left, so that a new beginning does not mix with it.

    Raises:
        CheckpointError: it cannot be renamed.
    """
    root = output / FOLDER
    try:
        if not root.is_dir() or not any(root.iterdir()):
            return None
        number = 1
        while (target := root.with_name(f"{FOLDER}.old-{number}")).exists():
            number += 1
        os.rename(root, target)
    except OSError as error:
        raise CheckpointError(
            f"{root} of an earlier run cannot be renamed ({error.strerror}); make {output} writable, or set output to "
            "another folder"
        ) from error
    return target


def check_fixed(folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with another model, batch size and the like; what an older version did not save is not compared.

    Raises:
        CheckpointError: names each field with both values.
    """
    before = _flat(saved)
    changed = [
        f"{name}: {before[name]!r} then, {value!r} now"
        for name, value in _flat(now).items()
        if name in before and before[name] != value
    ]
    if changed:
        raise CheckpointError(
            f"checkpoint {folder} is of another run ({'; '.join(changed)}); undo the change, choose another output "
            "folder, or start anew with checkpoint.resume=never"
        )


def _flat(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """One level of nesting less: ``model`` becomes ``model.hidden`` and so on."""
    flat: dict[str, Any] = {}
    for name, value in fixed.items():
        flat |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, Mapping) else {name: value}
    return flat


def _matching(output: Path, name: re.Pattern[str]) -> list[Path]:
    root = output / FOLDER
    return sorted(p for p in root.iterdir() if name.match(p.name) and p.is_dir()) if root.is_dir() else []


def update_of(folder: Path) -> int:
    """The number in a final name."""
    match = _NAME.match(folder.name)
    assert match is not None
    return int(match[1])
