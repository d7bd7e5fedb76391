"""Real ``megatron-fr train`` processes for the tests of the main job, ended whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import yaml

from megatron_fr.runtime.spawn import tied_to_us
from tests.support.processes import family_of

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs" / "tiny_python_tool.yaml"


def arguments(model: Path, output: Path, *overrides: str) -> list[str]:
    """The command line of a short run of the embedded recipe on ``model`` (which holds its prompts)."""
    return [sys.executable, "-m", "megatron_fr.cli", "train", *options(model, output, *overrides)]


def options(model: Path, output: Path, *overrides: str) -> list[str]:
    """What follows ``megatron-fr train`` there."""
    return [
        *("--config", str(RECIPE)),
        *(f"model.path={model}", f"data.train={model / 'train.jsonl'}", "data.eval=null", f"output={output}"),
        *("train.batch_size=8", "train.micro_batch_size=4", "rollout.max_concurrent_trajectories=8"),
        *("rollout.max_new_tokens=48", "agent.max_tokens_per_turn=16"),
        *overrides,
    ]


@contextlib.contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process, with everything it started killed at the end; its output goes to ``log``."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    with log.open("wb") as out:
        process = subprocess.Popen(tied_to_us(command), stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
    try:
        yield process
    finally:
        for child in family_of(process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait()


def finish(command: list[str], log: Path, *, timeout_s: float = 500) -> tuple[int, str]:
    """Run to the end; exit status and output."""
    with running(command, log) as process:
        status = process.wait(timeout_s)
    return status, log.read_text()


def wait_for(text: str, log: Path, process: subprocess.Popen[bytes], *, timeout_s: float = 400) -> None:
    """Until the output holds ``text``."""
    deadline = time.monotonic() + timeout_s
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, f"no {text!r} within {timeout_s} s:\n{log.read_text()}"
        time.sleep(0.05)


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C, as a terminal sends it."""
    process.send_signal(signal.SIGINT)


def recipe() -> dict[str, object]:
    """The embedded recipe as written."""
    return dict(yaml.safe_load(RECIPE.read_text()))
