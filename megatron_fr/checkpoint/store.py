"""Folders of training checkpoints: names, what is complete, which one to go on from, which ones stay. No torch.

``output/training_state/update-000040/`` holds the tensors (``torch.distributed.checkpoint``), ``run.json`` (counters,
and settings that must not change), ``rollout.state`` (of the rollout service), ``hf/`` (the model's configuration and
tokenizer, for conversion) and, written last, ``manifest.json`` with the size of every other file. A folder gets its
final name when it is complete and on the disk; until then it is ``update-000040.tmp``.

Other names: ``update-000040.abandoned-1`` was newer than the one that a run went on from; people may look at it or
rename it back. ``update-000040.deleted`` is about to go. The trainer locks ``output/training_state.lock`` for its whole
life, so an unfinished folder beside it is of a killed run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron_fr.errors import CheckpointError, UnreadableCheckpointError
from megatron_fr.hf.atomic import sync_path

FOLDER = "training_state"
#: Folder of the Hugging Face folders that a run writes.
MODELS = "checkpoints"
MANIFEST_FILE = "manifest.json"
RUN_FILE = "run.json"
ROLLOUT_FILE = "rollout.state"
#: Folder in a checkpoint with the model's configuration, tokenizer and chat template.
HF_FILES = "hf"
_WORK, _DELETED = ".tmp", ".deleted"


@dataclass(frozen=True)
class RunRecord:
    """``run.json``."""

    update: int  #: batches consumed
    version: int  #: version of the weights
    score: float | None = None  #: held-out reward of these weights, None where they were not evaluated
    fixed: Mapping[str, Any] = field(default_factory=dict)  #: settings that must be the same to go on, by field name
    trainer: Mapping[str, Any] = field(default_factory=dict)  #: counters of the tensors, see ``checkpoint/io.py``


def read_record(folder: Path) -> RunRecord:
    """Read the ``run.json`` of a checkpoint; raises CheckpointError where it is missing or damaged."""
    path = folder / RUN_FILE
    try:
        values = json.loads(path.read_bytes())
        return RunRecord(**{f.name: values[f.name] for f in fields(RunRecord)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error


def folder_of(output: Path, update: int) -> Path:
    """Where the checkpoint after ``update`` is."""
    return output / FOLDER / f"update-{update:06d}"


def _update_of(folder: Path) -> int:
    return int(folder.name.removeprefix("update-"))


def all_checkpoints(output: Path) -> list[Path]:
    """List folders with a final name, newest first, unchecked; raises CheckpointError where this is impossible."""
    return sorted(_matching(output, ""), key=_update_of, reverse=True)


def check_sizes(folder: Path) -> RunRecord:
    """Compare the size of every file with the manifest; returns the checkpoint's ``run.json``.

    Raises:
        UnreadableCheckpointError: files cannot be looked at, which says nothing of what they hold.
        CheckpointError: the checkpoint is incomplete or damaged.
    """
    name = MANIFEST_FILE
    try:
        files = json.loads((folder / name).read_bytes())["files"]
        sizes = {str(path): int(entry["bytes"]) for path, entry in files.items()}
        for name, expected in sizes.items():
            if (size := (folder / name).stat().st_size) != expected:
                raise CheckpointError(f"{name} has {size} bytes, expected {expected}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST_FILE} is damaged: {error!r}") from error
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise CheckpointError(f"{name} is missing") from error
    except OSError as error:
        raise UnreadableCheckpointError(
            f"{name} cannot be read now ({error.strerror}), which is no sign of damage: mend the access to it"
        ) from error
    return read_record(folder)


def newest_usable(output: Path, say: Callable[[str], None] = print) -> Path | None:
    """Find the newest complete checkpoint, None where there is none; ``say`` gets a line for each that is skipped.

    A complete folder that a killed run did not rename yet gets its final name first.

    Raises:
        CheckpointError: the folder cannot be listed, or none of its checkpoints is usable: a person must decide then.
    """
    for work in _matching(output, _WORK):
        _name_if_complete(work, say)
    skipped = []
    for folder in all_checkpoints(output):
        try:
            check_sizes(folder)
            return folder
        except CheckpointError as error:
            say(f"skipped checkpoint {folder}: {error}")
            skipped.append(f"{folder}: {error}")
    if not skipped:
        return None
    raise CheckpointError(
        f"no training checkpoint can be gone on from ({'; '.join(skipped)}); repair one of them, or start anew with "
        "checkpoint.resume=never, which keeps them under another name"
    )


def find_resumed(output: Path, given: str) -> Path | None:
    """Find the checkpoint of ``given``: a folder, ``auto`` (see :func:`newest_usable`), or ``never`` (None).

    Raises:
        CheckpointError: the folder is damaged or cannot be read.
    """
    if given == "never":
        return None
    if given == "auto":
        return newest_usable(output)
    try:
        check_sizes(Path(given))
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {given} cannot be gone on from: {error}; choose another one") from error
    return Path(given)


def remove_unfinished(output: Path, say: Callable[[str], None] = print) -> None:
    """Delete the unfinished folders of killed runs. The caller holds the lock."""
    for left in _matching(output, _WORK) + _matching(output, _DELETED):
        if left.suffix == _DELETED or not _name_if_complete(left, say):
            try:
                shutil.rmtree(left)
                say(f"removed {left}, which an earlier run left behind")
            except OSError as error:
                say(f"left {left} alone: {error}")


def work_folder(output: Path, update: int) -> Path:
    """Make an empty folder for the checkpoint after ``update``, or raise OSError."""
    work = folder_of(output, update).with_suffix(_WORK)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    return work


def complete(work: Path, record: RunRecord, written: Mapping[str, int] | None = None) -> Path:
    """Write record and manifest, bring everything to the disk and give the folder its final name.

    Args:
        written: sizes in bytes of files that other machines wrote, which this machine may not see yet.

    Raises:
        OSError: the disk is full or gone; the folder keeps its temporary name.
    """
    (work / RUN_FILE).write_text(json.dumps(asdict(record), indent=2) + "\n")
    inside = sorted(work.rglob("*"))
    files = [path for path in inside if path.is_file()]
    sizes = {str(path.relative_to(work)): path.stat().st_size for path in files} | dict(written or {})
    manifest = work / MANIFEST_FILE
    for path in files:
        sync_path(path)
    manifest.write_text(json.dumps({"files": {name: {"bytes": sizes[name]} for name in sorted(sizes)}}, indent=2))
    for path in (manifest, *(path for path in inside if path.is_dir()), work):
        sync_path(path)
    return _give_name(work)


def set_newer_aside(output: Path, update: int) -> list[Path]:
    """Rename the checkpoints and Hugging Face folders after ``update``, or raise CheckpointError; their new paths."""
    try:
        folders = [*all_checkpoints(output), *_matching(output, "", MODELS)]
        return [_rename_aside(folder, "abandoned") for folder in folders if _update_of(folder) > update]
    except OSError as error:
        raise CheckpointError(
            f"{error.filename}: checkpoints after update {update}, which this run goes on from, have to be renamed and "
            f"cannot be ({error.strerror}); make the folder writable, or move them away"
        ) from error


def set_aside(output: Path) -> Path | None:
    """Rename the folder of an earlier run's checkpoints, if any, or raise CheckpointError; returns its new path."""
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
        written: the checkpoint just completed; it stays, and later updates are not touched.

    Returns:
        a line for each checkpoint that cannot be deleted or read.
    """
    records = {written: read_record(written)}
    damaged: list[Path] = []
    stuck: list[str] = []
    for folder in all_checkpoints(output):
        if _update_of(folder) < _update_of(written):
            try:
                records[folder] = check_sizes(folder)
            except UnreadableCheckpointError as error:
                stuck.append(f"{folder} stays: {error}")
            except CheckpointError:
                damaged.append(folder)
    scored = sorted(((r.score, r.update, f) for f, r in records.items() if r.score is not None), reverse=True)
    kept = {*list(records)[:last], *(folder for _, _, folder in scored[:best])}
    for folder in sorted({*damaged, *records} - kept):
        going = folder.with_suffix(_DELETED)  # a crash half-way leaves no folder that looks complete
        try:
            os.rename(folder, going)
            shutil.rmtree(going)
        except OSError as error:
            stuck.append(f"{folder} should go and cannot be deleted: {error.strerror}")
    return stuck


def unwritable(folder: Path, error: Exception) -> CheckpointError:
    """Make the error of a checkpoint that could not be written."""
    reason = getattr(error, "strerror", None) or error
    return CheckpointError(
        f"checkpoint {folder} could not be written ({reason}); free space or set output to another folder. Earlier "
        "checkpoints are untouched: the same command goes on from the newest one"
    )


def _matching(output: Path, suffix: str, parent: str = FOLDER) -> list[Path]:
    root, name = output / parent, re.compile(rf"update-\d{{6,}}{re.escape(suffix)}")
    try:
        return sorted(p for p in root.iterdir() if name.fullmatch(p.name) and p.is_dir()) if root.is_dir() else []
    except OSError as error:
        raise CheckpointError(
            f"checkpoints in {root} cannot be listed ({error.strerror}): mend the access to that folder, or "
            "start anew in another output"
        ) from error


def _name_if_complete(work: Path, say: Callable[[str], None]) -> bool:
    """Name what a killed run completed; False where it did not."""
    try:
        check_sizes(work)
        say(f"named {_give_name(work)}, which an earlier run was killed before naming")
    except (UnreadableCheckpointError, OSError) as error:
        say(f"left {work} alone: {error}")
    except CheckpointError:
        return False
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
    sync_path(final.parent)
    return final


def _rename_aside(folder: Path, why: str) -> Path:
    """Give a folder a name that nothing goes on from; returns its new path."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.{why}-{number}")).exists():
        number += 1
    os.rename(folder, target)
    return target
