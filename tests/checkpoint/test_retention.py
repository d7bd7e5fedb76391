"""Which folder a run goes on from, which ones stay, and what a crash between two renames leaves. No model."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_fr.checkpoint.store import (
    RunRecord,
    check_sizes,
    complete,
    folder_of,
    newest_usable,
    remove_unfinished,
    retain,
    set_newer_aside,
    work_folder,
)
from megatron_fr.errors import CheckpointError


def write(output: Path, update: int, *, score: float | None = None, data: bytes = b"data") -> Path:
    """A checkpoint with everything but Megatron's formats."""
    work = work_folder(output, update)
    (work / "__0_0.distcp").write_bytes(data)
    (work / "hf").mkdir()
    (work / "hf" / "config.json").write_text("{}")
    return complete(work, RunRecord(update, update, score))


def cut(folder: Path) -> Path:
    """Damage it, as a full disk or a crash of the machine would."""
    os.truncate(folder / "__0_0.distcp", 1)
    return folder


def make_unreadable(folder: Path) -> Path:
    """Its storage answers EIO from now on (reading this file does, at address 0)."""
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").symlink_to("/proc/self/mem")
    return folder


def names(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "training_state").iterdir())


def test_what_a_run_goes_on_from_and_what_it_writes_stay_and_later_ones_get_another_name(tmp_path: Path) -> None:
    for update in (10, 20, 30):
        write(tmp_path, update)
    for update in (10, 20):
        (tmp_path / "checkpoints" / f"update-{update:06d}").mkdir(parents=True)
    moved = set_newer_aside(tmp_path, 10)
    assert sorted(str(path.relative_to(tmp_path)) for path in moved) == [
        "checkpoints/update-000020.abandoned-1",
        "training_state/update-000020.abandoned-1",
        "training_state/update-000030.abandoned-1",
    ]
    assert (tmp_path / "checkpoints" / "update-000010").exists()
    assert newest_usable(tmp_path) == folder_of(tmp_path, 10)
    assert retain(tmp_path, write(tmp_path, 11), last=2, best=0) == []
    checkpoints = sorted(path for path in moved if path.parent.name == "training_state")
    assert names(tmp_path) == ["update-000010", "update-000011", *(path.name for path in checkpoints)]
    write(tmp_path, 20)
    assert [path.name for path in set_newer_aside(tmp_path, 11)] == ["update-000020.abandoned-2"]
    for path in checkpoints:
        check_sizes(path)  # for a person to go back to


def test_damaged_checkpoints_fill_no_place_among_those_kept(tmp_path: Path) -> None:
    write(tmp_path, 10, score=0.5)
    cut(write(tmp_path, 20, score=0.9))
    cut(write(tmp_path, 30, score=0.8))
    said: list[str] = []
    assert newest_usable(tmp_path, said.append) == folder_of(tmp_path, 10)
    assert [line.rsplit("/", 1)[1] for line in said] == [
        f"update-0000{n}: __0_0.distcp has 1 bytes, expected 4" for n in (30, 20)
    ]
    # Renamed or not: what was just written stays, and the only other good one is the second newest and the best.
    assert retain(tmp_path, write(tmp_path, 11), last=2, best=0) == []
    assert names(tmp_path) == ["update-000010", "update-000011", "update-000020", "update-000030"]
    assert retain(tmp_path, write(tmp_path, 31), last=3, best=0) == []
    assert names(tmp_path) == ["update-000010", "update-000011", "update-000031"]
    cut(write(tmp_path, 32, score=0.9))
    assert retain(tmp_path, write(tmp_path, 33), last=1, best=1) == []
    assert names(tmp_path) == ["update-000010", "update-000033"]


def test_a_checkpoint_that_cannot_be_read_is_neither_deleted_nor_counted(tmp_path: Path) -> None:
    write(tmp_path, 1)
    make_unreadable(write(tmp_path, 2))
    (line,) = retain(tmp_path, write(tmp_path, 3), last=2, best=0)
    assert "update-000002 stays: manifest.json cannot be read now (Input/output error)" in line
    assert names(tmp_path) == ["update-000001", "update-000002", "update-000003"]


def test_where_none_is_usable_a_run_ends_instead_of_beginning_again(tmp_path: Path) -> None:
    assert newest_usable(tmp_path) is None
    (tmp_path / "training_state").mkdir()
    assert newest_usable(tmp_path) is None
    cut(write(tmp_path, 1))
    make_unreadable(write(tmp_path, 2))
    (write(tmp_path, 3) / "hf" / "config.json").unlink()
    with pytest.raises(CheckpointError) as raised:
        newest_usable(tmp_path)
    assert str(raised.value) == (
        f"no training checkpoint can be gone on from ({folder_of(tmp_path, 3)}: hf/config.json is missing; "
        f"{folder_of(tmp_path, 2)}: manifest.json cannot be read now (Input/output error), "
        "which is no sign of damage: mend the access to it; "
        f"{folder_of(tmp_path, 1)}: __0_0.distcp has 1 bytes, expected 4); "
        "repair one of them, or start anew with checkpoint.resume=never, which keeps them under another name"
    )


def killed_in_rename(output: Path, number: int) -> None:
    """Write update 1 again and die where it renames for the ``number``-th time."""
    rename, done = os.rename, list[int]()

    def renaming(*args: Any, **kwargs: Any) -> None:
        done.append(1)
        if len(done) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*args, **kwargs)

    with mock.patch("os.rename", renaming):
        write(output, 1, data=b"newer")


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("explicit", [False, True])
def test_a_crash_while_a_folder_takes_the_name_of_an_older_one_loses_neither(
    tmp_path: Path, number: int, explicit: bool
) -> None:
    write(tmp_path, 1, data=b"older")
    child = multiprocessing.get_context("fork").Process(target=killed_in_rename, args=(tmp_path, number))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    assert (folder_of(tmp_path, 1)).exists() == (number == 1)
    if explicit:  # resumed from a folder that was named: nobody looked for the newest
        remove_unfinished(tmp_path, lambda _: None)
    assert newest_usable(tmp_path) == folder_of(tmp_path, 1)
    assert (folder_of(tmp_path, 1) / "__0_0.distcp").read_bytes() == b"newer"
    remove_unfinished(tmp_path)
    assert names(tmp_path) == ["update-000001", "update-000001.abandoned-1"]


def test_files_and_folders_are_on_the_disk_before_the_name_is(tmp_path: Path) -> None:
    synced: list[str] = []
    fsync, rename = os.fsync, os.rename

    def syncing(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renaming(*args: Any) -> None:
        synced.append("renamed")
        rename(*args)

    with mock.patch("os.fsync", syncing), mock.patch("os.rename", renaming):
        write(tmp_path, 1)
    before, after = synced[: synced.index("renamed")], synced[synced.index("renamed") + 1 :]
    assert sorted(before[:-3]) == ["__0_0.distcp", "config.json", "run.json"]
    assert before[-3:] == ["manifest.json", "hf", "update-000001.tmp"]
    assert after == ["training_state"]


def test_what_was_about_to_be_deleted_goes_at_the_next_start(tmp_path: Path) -> None:
    write(tmp_path, 1).rename(tmp_path / "training_state" / "update-000001.deleted")
    assert newest_usable(tmp_path) is None
    said: list[str] = []
    remove_unfinished(tmp_path, said.append)
    assert names(tmp_path) == []
    assert said == [f"removed {tmp_path}/training_state/update-000001.deleted, which an earlier run left behind"]
