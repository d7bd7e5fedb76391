"""Which training checkpoints go and which stay. No torch."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megatron_fr.checkpoint.manifest import check_sizes
from megatron_fr.checkpoint.store import DELETED_SUFFIX, all_checkpoints, read_record, rename_aside, update_of
from megatron_fr.errors import CheckpointError, UnreadableCheckpointError


def set_newer_aside(output: Path, update: int) -> list[Path]:
    """Rename the checkpoints after ``update``: a run that goes on from there makes its own, and must not mix with them.

    Returns:
        their new paths.

    Raises:
        CheckpointError: one cannot be renamed.
    """
    moved = []
    try:
        for folder in all_checkpoints(output):
            if update_of(folder) > update:
                moved.append(rename_aside(folder))
    except OSError as error:
        raise CheckpointError(
            f"{error.filename}: checkpoints after update {update}, which this run goes on from, have to be renamed and "
            f"cannot be ({error.strerror}); make the folder writable, or move them away"
        ) from error
    return moved


def retain(output: Path, written: Path, *, last: int, best: int) -> list[str]:
    """Delete all but the ``last`` newest and the ``best`` with the highest score (the newer of equals).

    Args:
        written: the one just completed; it is the newest, whatever else lies there. Later updates are not touched.

    What is damaged, by its sizes, fills no place among those kept; what cannot be read stays without filling one.

    Returns:
        for each that should go and could not be deleted, or cannot be read, why, in one line.
    """
    problems: list[str] = []
    usable, doomed = [written], []
    scored: list[tuple[float, int, Path]] = []
    try:
        folders = [folder for folder in all_checkpoints(output) if update_of(folder) <= update_of(written)]
    except OSError as error:
        return [f"checkpoints cannot be listed: {error.strerror}"]
    for folder in folders:
        try:
            check_sizes(folder)
            record = read_record(folder)
        except UnreadableCheckpointError as error:
            problems.append(f"{folder} stays: {error}")
            continue
        except CheckpointError:
            doomed.append(folder)
            continue
        if folder != written:
            usable.append(folder)
        if record.score is not None:
            scored.append((record.score, record.update, folder))
    kept = {*usable[:last], *(folder for _, _, folder in sorted(scored, reverse=True)[:best])}
    for folder in (*doomed, *(folder for folder in usable if folder not in kept)):
        if folder == written:  # never, even if its sizes look wrong from here
            continue
        going = folder.with_suffix(DELETED_SUFFIX)  # a crash half-way leaves no folder that looks complete
        try:
            os.rename(folder, going)
            shutil.rmtree(going)
        except OSError as error:
            problems.append(f"{folder} should go and cannot be deleted: {error.strerror}")
    return problems
