"""Run a function on several ranks, each in its own process, and collect what they return.

A test calls ``run_ranks(function, world_size, **kwargs)`` with a module-level function of any test file. The function
runs with torchrun's variables set; its return value comes back through ``torch.save``. All ranks are ended when one
fails or the time is up, and the failing rank's output becomes the test's error.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_fr.ports import lease_free_port

ROOT = Path(__file__).resolve().parents[1]


def run_ranks(function: Callable[..., Any], world_size: int, *, timeout_s: float = 240, **kwargs: Any) -> list[Any]:
    """Call ``function(**kwargs)`` on ``world_size`` CPU ranks and return their answers in rank order."""
    # Ranks import for a long time before they bind it: a port that was only free is another test's by then.
    with tempfile.TemporaryDirectory() as name, lease_free_port("127.0.0.1") as lease:
        folder = Path(name)
        (folder / "call").write_bytes(
            pickle.dumps((sys.modules[function.__module__].__file__, function.__qualname__, pickle.dumps(kwargs)))
        )
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world_size):
                environ = os.environ | {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(lease.port),
                    "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
                    "OMP_NUM_THREADS": "1",
                    "CUDA_VISIBLE_DEVICES": "",
                    "PYTHONWARNINGS": "ignore",
                }
                command = [sys.executable, str(Path(__file__).resolve()), str(folder)]
                with (folder / f"log{rank}").open("wb") as log:
                    ranks.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True))
            _wait(ranks, folder, timeout_s)
        finally:
            for process in ranks:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        import torch

        return [torch.load(folder / f"answer{rank}", weights_only=False) for rank in range(world_size)]


def initialize_layout(folder: Path, layout: dict[str, int]) -> tuple[Any, Any]:
    """On a rank: join the others in a parallel layout; the run's configuration for the model in ``folder``, device."""
    from megatron_fr.config import RunConfig
    from megatron_fr.device import resolve_device
    from megatron_fr.trainer import distributed

    config = RunConfig.model_validate(
        {
            "model": {"path": str(folder), "dtype": "float32"},
            "parallel": {"world_size": int(os.environ["WORLD_SIZE"]), **layout},
            "train": {"num_updates": 1, "batch_size": 2},
            "reward": {"function": "unused:unused"},
            "data": {"train": "unused.jsonl"},
        }
    )
    device = resolve_device("cpu")
    distributed.initialize(config.parallel, device, seed=1, timeout_s=60)
    return config, device


def _wait(ranks: list[subprocess.Popen[bytes]], folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in ranks):
        if time.monotonic() > deadline:
            raise AssertionError(f"ranks still running after {timeout_s} s\n" + _logs(folder, range(len(ranks))))
        if any(process.poll() for process in ranks):
            break
        time.sleep(0.05)
    if failed := [rank for rank, process in enumerate(ranks) if process.poll()]:
        raise AssertionError(f"ranks {failed} failed\n" + _logs(folder, failed))


def _logs(folder: Path, ranks: Any) -> str:
    return "\n".join(f"--- rank {r} ---\n{(folder / f'log{r}').read_text(errors='replace')[-6000:]}" for r in ranks)


def _main(folder: Path) -> None:
    path, qualname, kwargs = pickle.loads((folder / "call").read_bytes())
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    import torch

    torch.set_num_threads(1)
    # Only now: the arguments may be of classes that the test's own modules define.
    answer = getattr(module, qualname)(**pickle.loads(kwargs))
    rank = os.environ["RANK"]
    torch.save(answer, folder / f"answer{rank}")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
