"""Folders of training checkpoints: names, manifests, which one to go on from, which ones to keep. No torch.

``output/training_state/update-000040/`` holds Megatron's files (``dist_checkpointing``, torch_dist), ``run.json``
(counters and what of the configuration must not change), ``rollout.state`` (of the rollout service) and, written last,
``manifest.json`` with the size and SHA-256 of every other file. A folder has its final name only when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron_fr.errors import CheckpointError

FOLDER = "training_state"
RUN_FILE = "run.json"
ROLLOUT_FILE = "rollout.state"
MANIFEST_FILE = "manifest.json"
_NAME = re.compile(r"^update-(\d{6,})$")
_WORK_SUFFIX = ".tmp"


@dataclass(frozen=True)
class RunRecord:
    """``run.json``.

    Attributes:
        update: batches consumed.
        version: of the weights.
        score: the latest ``eval/reward``, None before the first.
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


def work_folder(output: Path, update: int) -> Path:
    """An empty folder to write that checkpoint into; a left-over of an earlier attempt is removed.

    Raises:
        OSError: it cannot be made.
    """
    work = folder_of(output, update).with_suffix(_WORK_SUFFIX)
    if work.exists():
        shutil.rmtree(work)
    work.mkdir(parents=True)
    return work


def complete(work: Path) -> Path:
    """Write the manifest and give the folder its final name.

    Raises:
        OSError: the disk is full or gone; the folder keeps its temporary name.
    """
    files = sorted(path for path in work.iterdir() if path.is_file())
    entries = dict(zip((p.name for p in files), _in_threads(_describe, files), strict=True))
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


def retain(output: Path, *, last: int, best: int) -> None:
    """Delete all but the ``last`` newest and the ``best`` with the highest score (the newer of equals)."""
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
            os.rename(folder, doomed)
            shutil.rmtree(doomed)


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
