"""Run a function on several ranks, each in its own process, and collect what they return.

A test calls ``run_ranks(function, world_size, **kwargs)`` with a module-level function of any test file. The function
runs with torchrun's variables set; its return value comes back through ``torch.save``. All ranks are ended when one
fails or the time is up, and the failing rank's output becomes the test's error.

The ranks are forked from one process that imported the trainer (``rank_preload``): its imports take longer than most
of what the ranks do.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megatron_fr.runtime.ports import lease_free_port

ROOT = Path(__file__).resolve().parents[2]

PRELOAD = "tests.support.rank_preload"

#: Whether ranks may be started; not in the fast tier. ``tests/conftest.py`` sets it.
allowed = True

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([PRELOAD])


def fork_process(main: Callable[..., None], log: Path, environ: dict[str, str], *args: Any) -> BaseProcess:
    """Start ``main(*args)`` in a session of its own, forked from the process that imported the trainer.

    Args:
        main: a module-level function that can be imported from the checkout.
        log: where its output goes.
        environ: added to the environment that ``rank_preload`` found.
    """
    assert allowed, "a test that starts ranks is not for the fast tier: mark it with pytest.mark.slow"
    _start_server()
    log.touch()
    process = _FORKS.Process(target=_begin, args=(main, str(log), environ, args))
    process.start()
    return process


@functools.cache
def _start_server() -> None:
    """Python 3.12 gives the server no ``sys.path``, and it passes over what it cannot import."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [before])])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _begin(main: Callable[..., None], log: str, environ: dict[str, str], args: Sequence[Any]) -> None:
    os.setsid()
    os.nice(5)  # ranks that compute leave room for servers with time limits, where tests run side by side
    threading.Thread(target=_end_with_the_tests, daemon=True).start()
    os.environ |= environ
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    assert PRELOAD in sys.modules
    main(*args)


def _end_with_the_tests() -> None:
    tests = multiprocessing.parent_process()
    assert tests is not None
    tests.join()
    os.killpg(0, signal.SIGKILL)


def end_process(process: BaseProcess) -> None:
    """Kill it and what it started, if it still runs."""
    if process.is_alive() and process.pid is not None:
        with contextlib.suppress(ProcessLookupError):  # it has no session of its own yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.join()


def run_ranks(function: Callable[..., Any], world_size: int, *, timeout_s: float = 240, **kwargs: Any) -> list[Any]:
    """Call ``function(**kwargs)`` on ``world_size`` CPU ranks and return their answers in rank order."""
    # A port that was only free when it was looked for can be another test's by the time that the ranks bind it.
    with tempfile.TemporaryDirectory() as name, lease_free_port("127.0.0.1") as lease:
        folder = Path(name)
        (folder / "call").write_bytes(pickle.dumps((function, kwargs)))
        ranks: list[BaseProcess] = []
        try:
            for rank in range(world_size):
                environ = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(lease.port),
                }
                ranks.append(fork_process(_answer, folder / f"log{rank}", environ, folder))
            _wait(ranks, folder, timeout_s)
        finally:
            for process in ranks:
                end_process(process)
        import torch

        return [torch.load(folder / f"answer{rank}", weights_only=False) for rank in range(world_size)]


def initialize_layout(folder: Path, layout: dict[str, int]) -> tuple[Any, Any]:
    """On a rank: join the others in a parallel layout; the run's configuration for the model in ``folder``, device."""
    from megatron_fr.config import RunConfig
    from megatron_fr.runtime.device import resolve_device
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


def _wait(ranks: list[BaseProcess], folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.exitcode is None for process in ranks):
        if time.monotonic() > deadline:
            raise AssertionError(f"ranks still running after {timeout_s} s\n" + _logs(folder, range(len(ranks))))
        if any(process.exitcode for process in ranks):
            break
        time.sleep(0.05)
    if failed := [rank for rank, process in enumerate(ranks) if process.exitcode]:
        raise AssertionError(f"ranks {failed} failed\n" + _logs(folder, failed))


def _logs(folder: Path, ranks: Any) -> str:
    return "\n".join(f"--- rank {r} ---\n{(folder / f'log{r}').read_text(errors='replace')[-6000:]}" for r in ranks)


def _answer(folder: Path) -> None:
    function, kwargs = pickle.loads((folder / "call").read_bytes())
    import torch

    torch.set_num_threads(1)
    answer = function(**kwargs)
    rank = os.environ["RANK"]
    torch.save(answer, folder / f"answer{rank}")
