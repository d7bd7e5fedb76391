"""Bytes copied from file to file, and which of the two files an error names."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_fr.errors import ModelError
from megatron_fr.hf import extents
from megatron_fr.hf.extents import Extent, copy_extents

SIZE = 3_000_001


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Extent]:
    path = tmp_path / "source"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    with path.open("rb") as file:
        yield Extent(path, file.fileno(), 0, SIZE, "w")


@pytest.mark.parametrize("transfer", [1 << 30, 1000])  # as a copy of more than 2 GiB, in several transfers
@pytest.mark.parametrize("mode", ["wb", "ab"])  # to a file that is appended to, the kernel does not copy: EINVAL
def test_ranges_are_appended_in_order_also_where_the_kernel_does_not_copy(
    tmp_path: Path, source: Extent, mode: str, transfer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extents, "_MAX_TRANSFER", transfer)
    whole, places = source.path.read_bytes(), [(1_234_567, SIZE), (0, 0), (7, 8), (0, 1_000_000), (4096, 8192)]
    ranges = [Extent(source.path, source.descriptor, start, stop - start, "w") for start, stop in places]
    with (tmp_path / "target").open(mode, buffering=0) as file:
        file.write(b"header")
        assert copy_extents(ranges, file) == sum(stop - start for start, stop in places)
        file.write(b"end")
    wanted = b"header" + b"".join(whole[start:stop] for start, stop in places) + b"end"
    assert (tmp_path / "target").read_bytes() == wanted


def test_a_source_that_was_cut_or_cannot_be_read_is_named(tmp_path: Path, source: Extent) -> None:
    with (tmp_path / "target").open("wb", buffering=0) as file:
        with source.path.open("rb+") as cut:
            cut.truncate(SIZE - 1)
        with pytest.raises(ModelError, match=r"source: tensor 'w' ends early; the file was cut while it was read"):
            copy_extents([source], file)
        memory = Path("/proc/self/mem")  # at address 0 nothing is mapped: EIO
        with memory.open("rb") as unreadable:
            bad = Extent(memory, unreadable.fileno(), 0, 100, "w")
            with pytest.raises(ModelError, match=r"mem: tensor 'w' cannot be read \(Input/output error\)"):
                copy_extents([bad], file)


def test_an_error_of_the_kernels_copying_names_the_file_that_has_it(
    tmp_path: Path, source: Extent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is reported a single time, as network file systems do, is not lost."""
    failures = [OSError(errno.EIO, "Input/output error")]
    real = os.sendfile

    def sendfile(*arguments: int) -> int:
        if failures:
            raise failures.pop()
        return real(*arguments)

    monkeypatch.setattr(os, "sendfile", sendfile)
    with (tmp_path / "target").open("wb", buffering=0) as file, pytest.raises(OSError, match="Input/output error"):
        copy_extents([source], file)
    assert not failures


def test_a_full_disk_is_an_error_of_the_target(source: Extent) -> None:
    with Path("/dev/full").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        copy_extents([source], file)
