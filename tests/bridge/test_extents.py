"""Bytes copied from file to file, and which of the two files an error names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_fr.bridge.extents import Extent, copy_extents
from megatron_fr.errors import ModelError

SIZE = 3_000_001


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Extent]:
    path = tmp_path / "source"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    with path.open("rb") as file:
        yield Extent(path, file.fileno(), 0, SIZE, "w")


@pytest.mark.parametrize("mode", ["wb", "ab"])  # to a file that is appended to, the kernel does not copy: EINVAL
def test_ranges_are_appended_in_order_also_where_the_kernel_does_not_copy(
    tmp_path: Path, source: Extent, mode: str
) -> None:
    whole, places = source.path.read_bytes(), [(1_234_567, SIZE), (0, 0), (7, 8), (0, 1_000_000), (4096, 8192)]
    extents = [Extent(source.path, source.descriptor, start, stop - start, "w") for start, stop in places]
    with (tmp_path / "target").open(mode, buffering=0) as file:
        file.write(b"header")
        assert copy_extents(extents, file) == sum(stop - start for start, stop in places)
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


def test_a_full_disk_is_an_error_of_the_target(source: Extent) -> None:
    with Path("/dev/full").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        copy_extents([source], file)
