"""How the tests are shared out between processes (``pytest -n 2``), and a disk that can be filled."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_disk import SmallDisk

ROOT = Path(__file__).parent
#: Files that share fixtures which take long to make: all of them belong to one process.
TOGETHER = {
    **dict.fromkeys(("parallel/test_update.py", "parallel/test_aux_loss.py"), "updates"),
    **dict.fromkeys(("rollout/test_session.py", "rollout/test_weight_push.py"), "engine"),
    **dict.fromkeys(("trainer/test_model.py", "trainer/test_model_gradients.py"), "tiny_models"),
    **dict.fromkeys(("main_job/test_train.py", "main_job/test_bad_input.py"), "policy"),
}


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests run in one process, in order."""
    for item in items:
        file = item.path.relative_to(ROOT).as_posix()
        item.add_marker(pytest.mark.xdist_group(TOGETHER.get(file, file)))


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
        subprocess.run(["umount", str(folder)], check=True)
