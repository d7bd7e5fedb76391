"""What all tests share: a process prepared as a trainer's is, and a disk that can be filled."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_fr.runtime.device import prepare_process, resolve_device
from tests.support.small_disk import SmallDisk

prepare_process(resolve_device("auto"))  # some tests import Megatron-Core themselves


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """64 MiB; skips where the tests may not mount anything."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
