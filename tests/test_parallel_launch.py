"""The ranks that tests start: where they come from, and that they never stay."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.parallel_launch import run_ranks

ROOT = Path(__file__).resolve().parents[1]


def describe() -> dict[str, Any]:
    """What a rank finds when it begins."""
    return {
        "loaded": {"torch", "megatron.core", "megatron_fr.trainer.loop"} <= sys.modules.keys(),
        "flashinfer": importlib.util.find_spec("flashinfer"),
        "threads": psutil.Process(os.getppid()).num_threads(),
        "omp": os.environ["OMP_NUM_THREADS"],
    }


def stay(folder: Path) -> None:
    """Never end."""
    (folder / "pid").write_text(str(os.getpid()))
    time.sleep(600)


@pytest.mark.slow
def test_a_rank_begins_with_the_trainer_imported_by_a_process_without_threads() -> None:
    assert run_ranks(describe, 1) == [{"loaded": True, "flashinfer": None, "threads": 1, "omp": "1"}]


@pytest.mark.slow
def test_a_rank_ends_with_tests_that_are_killed(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from tests import test_parallel_launch as module; "
        f"module.run_ranks(module.stay, 1, folder=Path({str(tmp_path)!r}))"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        while not (tmp_path / "pid").exists():
            assert owner.poll() is None
            time.sleep(0.1)
        rank = psutil.Process(int((tmp_path / "pid").read_text()))
        server = rank.parent()
    finally:
        owner.kill()
        owner.wait()
    assert server is not None
    assert psutil.wait_procs([rank, server], timeout=10)[1] == []
