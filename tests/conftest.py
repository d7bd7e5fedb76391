"""How the tests are shared out between processes (``pytest -n 2``), and a disk that can be filled."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_disk import SmallDisk
from xdist.scheduler import LoadScopeScheduling

from megatron_fr.device import hide_gpu_packages

if not torch.cuda.is_available():
    hide_gpu_packages()  # as in the processes of a run; some tests import Megatron-Core themselves

#: Files that share fixtures which take long to make: all of them belong to one process.
TOGETHER = {
    **dict.fromkeys(("parallel/test_update.py", "parallel/test_aux_loss.py"), "updates"),
    **dict.fromkeys(("rollout/test_session.py", "rollout/test_weight_push.py"), "engine"),
    **dict.fromkeys(("trainer/test_model.py", "trainer/test_model_gradients.py"), "tiny_models"),
}


class TogetherScheduling(LoadScopeScheduling):
    """A file's tests run in one process, in order."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0].removeprefix("tests/")
        return TOGETHER.get(file, file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> TogetherScheduling | None:
    """With ``--dist loadscope``; xdist's own groups (``loadgroup``) are without effect under pytest 9.2."""
    return TogetherScheduling(config, log) if config.getoption("dist") == "loadscope" else None


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
