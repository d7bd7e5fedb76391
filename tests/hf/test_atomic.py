"""Folders that appear whole: over kills at every moment, beside other writers, and only where they may."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fr.errors import ModelError
from megatron_fr.hf import atomic
from megatron_fr.hf.atomic import atomic_folder

FORK = multiprocessing.get_context("fork")  # the writers only touch files


def write(out: Path, text: str, *, overwrite: bool = True) -> None:
    with atomic_folder(out, overwrite=overwrite) as work:
        for name in ("config.json", f"of-{text}"):
            (work / name).write_text(text)


def read(out: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in out.iterdir()}


def kill_when_reached(writer: Callable[[Any], None]) -> None:
    """Start a writer, wait until it says where it is, and kill it there."""
    here, there = FORK.Pipe()
    process = FORK.Process(target=writer, args=(there,))
    process.start()
    assert here.poll(20), "the writer never came there"
    process.kill()
    process.join()


def stop_here(reached: Any) -> None:
    reached.send(None)
    time.sleep(60)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    write(tmp_path / "out", "first")
    return tmp_path / "out"


def assert_alone(out: Path, text: str) -> None:
    assert read(out) == {"config.json": text, f"of-{text}": text}
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_what_a_writer_killed_half_way_left_goes_with_the_next_write(out: Path) -> None:
    def writer(reached: Any) -> None:
        with atomic_folder(out, overwrite=True) as work:
            (work / "config.json").write_text("half")
            stop_here(reached)

    kill_when_reached(writer)
    assert read(out) == {"config.json": "first", "of-first": "first"}
    assert sorted(path.name for path in out.parent.iterdir()) == [".out.tmp", "out"]
    write(out, "second")
    assert_alone(out, "second")


def test_what_a_writer_killed_after_the_second_rename_left_goes_with_the_next_write(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def writer(reached: Any) -> None:
        monkeypatch.setattr(atomic, "sync_path", lambda path: path == out.parent and stop_here(reached))
        write(out, "second")

    kill_when_reached(writer)
    assert read(out) == {"config.json": "second", "of-second": "second"}
    assert sorted(path.name for path in out.parent.iterdir()) == [".out.old", "out"]
    write(out, "third")
    assert_alone(out, "third")


def test_the_next_write_puts_back_what_a_kill_between_the_two_renames_left(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def writer(reached: Any) -> None:
        def second_stops(source: Path, target: Path) -> None:
            if target == out:
                stop_here(reached)
            rename(source, target)

        monkeypatch.setattr(os, "rename", second_stops)
        write(out, "second")

    kill_when_reached(writer)
    assert not out.exists()
    with pytest.raises(ModelError, match="--overwrite"):
        write(out, "third", overwrite=False)
    assert_alone(out, "first")
    write(out, "third")
    assert_alone(out, "third")


def test_a_rename_that_fails_leaves_what_was_there(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def fails(source: Path, target: Path) -> None:
        if Path(source).name == ".out.tmp":
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(ModelError, match=r"out could not be written: .*Input/output error"):
        write(out, "second")
    assert_alone(out, "first")


def test_two_writers_to_one_folder_the_second_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "out") as work:
        (work / "config.json").write_text("first")
        with (
            pytest.raises(ModelError, match=r"another process writes .*out; wait"),
            atomic_folder(tmp_path / "out"),
        ):
            raise AssertionError("not reached")
        (work / "of-first").write_text("first")
    assert_alone(tmp_path / "out", "first")


def test_what_is_there_goes_only_when_asked_and_what_is_no_result_never(out: Path) -> None:
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match=r"out exists and holds config\.json; .* --overwrite"):
        write(out, "second", overwrite=False)
    assert read(out) == {"config.json": "first", "of-first": "first", "notes.txt": "mine"}
    (out / "config.json").unlink()
    with pytest.raises(ModelError, match="holds neither a model nor a checkpoint; choose another folder or empty it"):
        write(out, "second")
    for name in ("notes.txt", "of-first"):
        (out / name).unlink()
    write(out, "second", overwrite=False)
    assert_alone(out, "second")
