"""One run on one machine: starts the rollout service and the trainer ranks, watches both, ends both.

Children run in sessions of their own, so Ctrl-C reaches only this process. The trainer then saves a checkpoint while
the service still answers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron_fr.checkpoint.store import ROLLOUT_FILE, newest_usable
from megatron_fr.config import RunConfig, save_config
from megatron_fr.errors import MegatronFRError
from megatron_fr.observe.metrics import METRICS_FILE
from megatron_fr.runtime.ports import lease_free_port
from megatron_fr.runtime.spawn import tied_to_us

_POLL_S = 0.1
#: Time in which the rollout service ends its engines; then it is killed with them.
_SERVICE_GRACE_S = 3.0
#: Time in which the service may notice a dead engine and report it, after a trainer rank failed.
_SERVICE_REPORT_S = 2.0


@dataclass(frozen=True)
class Child:
    """A process of the run, and the byte at which this run's part of its log begins."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int

    @classmethod
    def spawn(
        cls, name: str, log: Path, arguments: Sequence[str], environment: Mapping[str, str], share_stdout: bool = False
    ) -> Child:
        """Start Python in a session of its own; it dies with this process and appends its output to ``log``."""
        with log.open("ab") as file:
            start = file.tell()
            process = subprocess.Popen(
                tied_to_us([sys.executable, "-u", *arguments]), stdin=subprocess.DEVNULL,
                stdout=None if share_stdout else file, stderr=file, start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ, **environment},
            )  # fmt: skip
        return cls(name, process, log, start)

    def error(self) -> str | None:
        """Find the last ``error:`` line of its log, with the lines that follow."""
        _, found, text = "\n".join(["", *self._lines()]).rpartition("\nerror: ")
        return text if found else None

    def reason(self) -> str:
        """Say why the ended process ended: its own error, or exit code or signal and its last lines."""
        code = self.process.wait()
        ended = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        last = "\n".join(self._lines()[-15:])
        return self.error() or f"{self.name} ended with {ended}; last lines of {self.log}:\n{last}"

    def kill_tree(self) -> None:
        """Kill the process and its descendants, and wait for them."""
        if self.process.poll() is None:
            _kill(self.tree())
        self.process.wait()

    def tree(self) -> list[psutil.Process]:
        """List the process and its descendants."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            return [*root.children(recursive=True), root]
        return []

    def _lines(self) -> list[str]:
        return self.log.read_bytes()[self.log_start :].decode(errors="replace").splitlines()


class Supervisor:
    """Runs ``config`` from start to end; use it once, in the main thread.

    Raises:
        MegatronFRError: the output folder cannot be written to.
        ConfigError: there are too few GPUs for trainer and engines.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._output = config.output.resolve()
        self._logs = self._output / "logs"
        self._config_file = str(self._output / "config.yaml")
        self._url_file = self._output / "service.url"
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            save_config(config.model_copy(update={"output": self._output}), self._config_file)
        except OSError as error:
            raise MegatronFRError(
                f"output={str(config.output)!r}: {error.strerror}; free space or choose another folder"
            ) from error
        self._rank_gpus, self._engine_gpus = _gpu_environments(config)
        self._signals = 0
        self._service: Child | None = None
        self._ranks: list[Child] = []

    def run(self) -> int:
        """Train; returns the exit status: 0 at the end, 130 after an interruption, 1 after a failure."""
        previous = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            status = self._run()
        except MegatronFRError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            status = 1
        finally:
            self._end_everything()
            for number, handler in previous.items():
                signal.signal(number, handler)
        self._report()
        return 130 if self._signals and status == 0 else status

    def _run(self) -> int:
        resume = newest_usable(self._output) if self._config.checkpoint.resume == "auto" else None
        if resume is not None:
            print(f"going on from {resume}; checkpoint.resume=never starts anew", flush=True)
        print(f"starting {self._config.rollout.engines} engine(s); logs in {self._logs}", flush=True)
        started = time.monotonic()
        self._url_file.unlink(missing_ok=True)
        # Held to the end: the ranks bind the port only after their imports, while engines look for ports.
        with lease_free_port("127.0.0.1") as rendezvous:
            service = self._start(resume, rendezvous.port)
            while not self._url_file.exists():
                if self._signals:
                    return 0
                if service.process.poll() is not None:
                    raise MegatronFRError(service.reason())
                raise_failure(service, self._ranks)
                time.sleep(_POLL_S)
            print(f"engines ready after {time.monotonic() - started:.0f} s", flush=True)
            self._wait_for_ranks()
            raise_failure(service, self._ranks)
            return 0

    def _start(self, resume: Path | None, port: int) -> Child:
        """Start the service, which is returned, and the ranks, which build their model while the engines start."""
        url, config = str(self._url_file), ["--config", self._config_file]
        restore = "never" if resume is None else str(resume / ROLLOUT_FILE)
        command = ["-m", "megatron_fr.rollout", *config, "--url-file", url, "--restore", restore]
        log = self._logs / "rollout.log"
        self._service = service = Child.spawn("the rollout service", log, command, self._engine_gpus)
        command = ["-m", "megatron_fr.trainer", *config, "--service", url, "--resume", str(resume or "never")]
        world_size = self._config.parallel.world_size
        place = self._rank_gpus | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
        for rank in range(world_size):
            environment = place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            log = self._logs / f"trainer-{rank}.log"
            self._ranks.append(Child.spawn(f"trainer rank {rank}", log, command, environment, rank == 0))
        return service

    def _wait_for_ranks(self) -> None:
        """Wait until the ranks end or one fails; an interruption asks them to save and stop."""
        grace, deadline = self._config.checkpoint.stop_grace_s, float("inf")
        while any(rank.process.poll() is None for rank in self._ranks):
            if self._signals and deadline == float("inf"):
                print("\ninterrupted: the trainer saves a checkpoint and stops", flush=True)
                deadline = time.monotonic() + grace
                for rank in self._ranks:
                    rank.process.terminate()
            if time.monotonic() > deadline or self._signals > 1:
                raise MegatronFRError(
                    f"the trainer did not stop within checkpoint.stop_grace_s={grace:g} and was killed; the same "
                    "command goes on from its last training checkpoint"
                )
            if any(rank.process.poll() for rank in self._ranks):
                time.sleep(1.0)  # the others may wait in a collective: let them report their own errors
                return
            time.sleep(_POLL_S)

    def _end_everything(self) -> None:
        for rank in self._ranks:
            rank.kill_tree()
        if self._service is not None:
            tree = self._service.tree()
            self._service.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # then its tree is killed
                self._service.process.wait(_SERVICE_GRACE_S)
            _kill(tree)
            self._service.kill_tree()

    def _report(self) -> None:
        if (self._output / METRICS_FILE).exists():
            from megatron_fr.observe.report import report_run  # slow: imports matplotlib

            try:
                print("\n" + report_run(self._output), flush=True)
            except MegatronFRError as error:
                print(f"no report: {error}", file=sys.stderr, flush=True)

    def _on_signal(self, *_: Any) -> None:
        self._signals += 1


def raise_failure(service: Child, ranks: Sequence[Child]) -> None:
    """Raise why a rank failed, if one did: the service's death or error explains the failures of ranks.

    Raises:
        MegatronFRError: a rank ended with an error.
    """
    if (failed := next((rank for rank in ranks if rank.process.poll()), None)) is None:
        return
    if (service.process.poll() or 0) < 0:  # killed: ranks know only that nobody answers
        raise MegatronFRError(service.reason())
    reason = failed.reason()
    deadline = time.monotonic() + _SERVICE_REPORT_S
    while (cause := service.error()) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if cause is not None and cause not in reason:
        reason = f"{cause}\n{failed.name}: {reason}"
    raise MegatronFRError(reason)


def _gpu_environments(config: RunConfig) -> tuple[dict[str, str], dict[str, str]]:
    """Make the variables that show trainer ranks and engines their GPUs; empty on a CPU."""
    if config.device == "cpu":
        return {}, {}
    from megatron_fr.runtime.device import resolve_device, split_gpus, visible_gpus  # slow: imports torch

    if resolve_device(config.device).kind == "cpu":
        return {}, {}
    needed = config.rollout.engines * config.rollout.engine_tp
    ranks, engines = split_gpus(visible_gpus(), trainer_ranks=config.parallel.world_size, engine_gpus=needed)
    return {"CUDA_VISIBLE_DEVICES": ",".join(ranks)}, {"CUDA_VISIBLE_DEVICES": ",".join(engines)}


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(list(processes), timeout=5)
