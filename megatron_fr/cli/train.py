"""One run on one machine: starts the rollout service and the trainer ranks, watches both, ends both.

Children run in their own sessions, so that Ctrl-C reaches this process alone and the order of ending is ours: the
trainer saves a checkpoint first, while the service still answers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
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
#: The rollout service ends its engines by itself within this time, or is killed with them.
_SERVICE_GRACE_S = 3.0
#: After a trainer rank failed, how long the service has to notice a dead engine and say so.
_SERVICE_WORD_S = 2.0


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
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            save_config(config.model_copy(update={"output": self._output}), self._config_file)
        except OSError as error:
            raise MegatronFRError(
                f"output={str(config.output)!r}: {error.strerror}; free space or choose another folder"
            ) from error
        self._rank_gpus, self._engine_gpus = _gpu_environments(config)
        self._signals = 0
        self._service: subprocess.Popen[bytes] | None = None
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._resume: Path | None = None
        #: Logs are appended to: where this run's part begins.
        self._log_starts: dict[Path, int] = {}

    @property
    def _config_file(self) -> Path:
        return self._output / "config.yaml"

    def run(self) -> int:
        """Train; the process's exit status: 0 at the end, 130 after an interruption, 1 after a failure."""
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
        rollout = self._config.rollout
        if self._config.checkpoint.resume == "auto":
            self._resume = newest_usable(self._output)
            if self._resume is not None:
                print(f"going on from {self._resume}; checkpoint.resume=never starts anew", flush=True)
        print(f"starting {rollout.engines} engine(s); logs in {self._logs}", flush=True)
        started = time.monotonic()
        url_file = self._output / "service.url"
        url_file.unlink(missing_ok=True)
        restore = ["--restore", "never" if self._resume is None else str(self._resume / ROLLOUT_FILE)]
        self._service = self._spawn(
            ["-m", "megatron_fr.rollout", "--config", str(self._config_file), "--url-file", str(url_file), *restore],
            log="rollout.log",
            environment=self._engine_gpus,
        )
        # Kept to the end: the ranks bind it only after their imports, while engines look for ports of their own.
        with lease_free_port("127.0.0.1") as rendezvous:
            # They import and build their model while the engines start, and wait for the address.
            self._start_ranks(url_file, rendezvous.port)
            if not self._wait_for_service(url_file):
                return 0
            print(f"engines ready after {time.monotonic() - started:.0f} s", flush=True)
            return self._watch()

    def _wait_for_service(self, url_file: Path) -> bool:
        """Wait for its address; false when interrupted meanwhile."""
        assert self._service is not None
        while not url_file.exists():
            if self._signals:
                return False
            if self._service.poll() is not None:
                raise MegatronFRError(self._reason("rollout.log", "the rollout service", self._service))
            self._check_ranks()
            time.sleep(_POLL_S)
        return True

    def _start_ranks(self, url_file: Path, port: int) -> None:
        world = self._config.parallel.world_size
        resume = ["--resume", "never" if self._resume is None else str(self._resume)]
        for rank in range(world):
            self._ranks.append(
                self._spawn(
                    [
                        "-m",
                        "megatron_fr.trainer",
                        "--config",
                        str(self._config_file),
                        "--service",
                        str(url_file),
                        *resume,
                    ],
                    log=None if rank == 0 else f"trainer-{rank}.log",
                    stderr_log=f"trainer-{rank}.log",
                    environment={
                        **self._rank_gpus,
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(world),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port),
                    },
                )
            )

    def _watch(self) -> int:
        """Wait for the ranks; an interruption asks them to save and stop."""
        deadline: float | None = None
        while any(rank.poll() is None for rank in self._ranks):
            if self._signals and deadline is None:
                print("\ninterrupted: the trainer saves a checkpoint and stops", flush=True)
                deadline = time.monotonic() + self._config.checkpoint.stop_grace_s
                for rank in self._ranks:
                    rank.terminate()
            if deadline is not None and (time.monotonic() > deadline or self._signals > 1):
                raise MegatronFRError(
                    f"the trainer did not stop within checkpoint.stop_grace_s={self._config.checkpoint.stop_grace_s:g} "
                    "and was killed; the same command goes on from its last training checkpoint"
                )
            if any(rank.poll() for rank in self._ranks):
                # The others may wait for the failed one in a collective; give them a moment for their own words.
                time.sleep(1.0)
                break
            time.sleep(_POLL_S)
        if any(rank.poll() for rank in self._ranks) and self._service is not None and (self._service.poll() or 0) < 0:
            # Killed by a signal: that explains why the ranks failed, who only know that nobody answers.
            raise MegatronFRError(self._reason("rollout.log", "the rollout service", self._service))
        self._check_ranks()
        return 0

    def _check_ranks(self) -> None:
        """Raise with a failed rank's last words, and with the service's where that failed first."""
        for number, rank in enumerate(self._ranks):
            if rank.poll():
                reason = self._reason(f"trainer-{number}.log", f"trainer rank {number}", rank)
                # A trainer that was talking to an engine knows only of a broken connection; the service watches them.
                cause = self._service_failure()
                if cause is not None and cause not in reason:
                    reason = f"{cause}\ntrainer rank {number}: {reason}"
                raise MegatronFRError(reason)

    def _service_failure(self) -> str | None:
        """Why the running service cannot go on, if it says so within a moment."""
        deadline = time.monotonic() + _SERVICE_WORD_S
        log = self._logs / "rollout.log"
        while True:
            if (said := _error_of(log, self._log_starts.get(log, 0))) is not None:
                return said
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)

    def _spawn(
        self,
        arguments: Sequence[str],
        *,
        log: str | None,
        stderr_log: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """A Python child in its own session that dies with this process; ``log=None`` shares our standard output."""
        for path in {self._logs / name for name in (log, stderr_log) if name is not None}:
            self._log_starts[path] = path.stat().st_size if path.exists() else 0
        out: Any = None if log is None else (self._logs / log).open("ab")
        err: Any = (
            subprocess.STDOUT if stderr_log is None or stderr_log == log else (self._logs / stderr_log).open("ab")
        )
        try:
            return subprocess.Popen(
                tied_to_us([sys.executable, "-u", *arguments]),
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})},
            )
        finally:
            for file in (out, err):
                if file is not None and file is not subprocess.STDOUT:
                    file.close()

    def _end_everything(self) -> None:
        _kill_trees(self._ranks)
        if self._service is not None and self._service.poll() is None:
            tree = _tree(self._service)
            self._service.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # then its tree is killed
                self._service.wait(_SERVICE_GRACE_S)
            _kill(tree)
        if self._service is not None:
            _kill_trees([self._service])

    def _report(self) -> None:
        if (self._output / METRICS_FILE).exists():
            from megatron_fr.observe.report import report_run  # imports matplotlib

            try:
                print("\n" + report_run(self._output), flush=True)
            except MegatronFRError as error:
                print(f"no report: {error}", file=sys.stderr, flush=True)

    def _reason(self, log: str, who: str, process: subprocess.Popen[bytes]) -> str:
        path = self._logs / log
        return _reason(path, who, process, self._log_starts.get(path, 0))

    def _on_signal(self, *_: Any) -> None:
        self._signals += 1


def _gpu_environments(config: RunConfig) -> tuple[dict[str, str], dict[str, str]]:
    """What trainer ranks and the rollout service see of this machine's GPUs; nothing to say on a CPU.

    Raises:
        ConfigError: a GPU was asked for and there is none, or there are too few.
    """
    if config.device == "cpu":
        return {}, {}
    from megatron_fr.runtime.device import resolve_device, split_gpus, visible_gpus  # imports torch

    if resolve_device(config.device).kind == "cpu":
        return {}, {}
    ranks, engines = split_gpus(
        visible_gpus(),
        trainer_ranks=config.parallel.world_size,
        engine_gpus=config.rollout.engines * config.rollout.engine_tp,
    )
    return {"CUDA_VISIBLE_DEVICES": ",".join(ranks)}, {"CUDA_VISIBLE_DEVICES": ",".join(engines)}


def _reason(log: Path, who: str, process: subprocess.Popen[bytes], start: int) -> str:
    """What a dead child said from byte ``start`` on: its own ``error:`` line, or how it ended and its last lines."""
    if (said := _error_of(log, start)) is not None:
        return said
    lines = _lines(log, start)
    code = process.poll()
    ended = f"exit code {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}"
    return f"{who} ended with {ended}; last lines of {log}:\n" + "\n".join(lines[-15:])


def _error_of(log: Path, start: int) -> str | None:
    """The last ``error:`` line that a log holds from byte ``start`` on, with what follows it."""
    lines = _lines(log, start)
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].startswith("error: "):
            return "\n".join([lines[index].removeprefix("error: "), *lines[index + 1 :]])
    return None


def _lines(log: Path, start: int) -> list[str]:
    return log.read_bytes()[start:].decode(errors="replace").splitlines() if log.exists() else []


def _tree(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        root = psutil.Process(process.pid)
        return [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return []


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(list(processes), timeout=5)


def _kill_trees(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            _kill(_tree(process))
        process.wait()
