"""What all tests share: a process prepared as a trainer's is, the tiers, and a disk that can be filled."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_fr.runtime.device import prepare_process, resolve_device
from tests.support import parallel_launch
from tests.support.small_disk import SmallDisk

prepare_process(resolve_device("auto"))  # some tests import Megatron-Core themselves


@pytest.fixture(autouse=True)
def same_umask() -> Iterator[None]:
    """Commands that a test calls in this process write for its user alone; the tests after it do not."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped fails")


def pytest_configure(config: pytest.Config) -> None:
    parallel_launch.allowed = config.option.markexpr != "not slow"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("no_skips"):
        report.outcome = "failed"
        report.longrepr = f"{report.longrepr[2]}; in this tier nothing may be skipped"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    if report.skipped and collector.config.getoption("no_skips"):
        report.outcome = "failed"
        report.longrepr = f"{report.longrepr[2]}; in this tier nothing may be skipped"
    return report


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
