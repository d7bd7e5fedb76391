"""One run on one machine: starts the rollout service and the trainer ranks, watches both, ends both.

Children run in sessions of their own, so Ctrl-C reaches only this process. The trainer then saves a checkpoint while
the service still answers.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from megatron_fr.checkpoint.fixed import check_unchanged, run_settings
from megatron_fr.checkpoint.store import ROLLOUT_FILE, all_checkpoints, newest_usable
from megatron_fr.config import RunConfig, save_config
from megatron_fr.errors import MegatronFRError
from megatron_fr.observe.metrics import METRICS_FILE
from megatron_fr.runtime.console import say_what_is_awaited
from megatron_fr.runtime.output_lock import lock_output, unwritable_output
from megatron_fr.runtime.ports import lease_free_port
from megatron_fr.runtime.spawn import tied_to_us

_POLL_S = 0.1
#: Time in which the rollout service ends its engines; then it is killed with them.
_SERVICE_GRACE_S = 3.0
#: Time in which the service may notice a dead engine and report it, after a trainer rank failed.
_SERVICE_REPORT_S = 2.0


#: What Python, torch and Megatron-Core warn of, with the line of source below it: never why a process ended.
_WARNING = re.compile(
    r"^(\S.*:\d+: \w*Warning: .*|(\[rank\d+\]:)?\[?W\d{4}.*|.*\bDEPRECATED\b.*)(\n|$)(?:  .*(\n|$))?", re.MULTILINE
)


class Child:
    """A process of the run.

    A thread copies its output to ``log`` and keeps the last lines: the log's disk may be full, or its folder deleted.
    """

    def __init__(self, name: str, log: Path, process: subprocess.Popen[bytes]) -> None:
        self.name, self.log, self.process = name, log, process
        self._last: deque[str] = deque(maxlen=400)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @classmethod
    def spawn(
        cls, name: str, log: Path, arguments: Sequence[str], environment: Mapping[str, str], share_stdout: bool = False
    ) -> Child:
        """Start Python in a session of its own; it dies with this process. ``share_stdout`` logs stderr alone."""
        output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(
            tied_to_us([sys.executable, "-u", *arguments]), stdin=subprocess.DEVNULL, start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ, **environment},
            **({"stderr": subprocess.PIPE} if share_stdout else output),
        )  # fmt: skip
        return cls(name, log, process)

    def error(self) -> str | None:
        """Find the last ``error:`` line of its output, with the lines that follow."""
        _, found, text = "\n".join(["", *self._last]).rpartition("\nerror: ")
        return text if found else None

    def reason(self) -> str:
        """Say why the ended process ended: its own error, or exit code or signal and its last lines."""
        code = self.process.wait()
        self._reader.join(1.0)  # a descendant may hold the pipe open
        ended = f"{self.name} ended with " + (
            f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        )
        ended += " (out of memory, or killed by hand)" if code == -signal.SIGKILL else ""
        last = _WARNING.sub("", "\n".join(self._last)).splitlines()[-15:]
        return self.error() or "\n".join([f"{ended}; last lines of {self.log}:", *last] if last else [ended])

    def last_line(self) -> str:
        """The last line of its output, without the time and level of Python's logging."""
        return re.sub(r"^[\d :,-]+[A-Z]+ ", "", self._last[-1])[:120] if self._last else "nothing said yet"

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

    def _read(self) -> None:
        pipe = self.process.stdout or self.process.stderr
        assert pipe is not None
        with contextlib.ExitStack() as stack:
            log = None
            with contextlib.suppress(OSError):
                log = stack.enter_context(self.log.open("ab", buffering=0))
            for line in pipe:
                self._last.append(line.decode(errors="replace").rstrip("\n"))
                with contextlib.suppress(OSError):  # the last lines are kept all the same
                    if log is not None:
                        log.write(line)


class Supervisor:
    """Runs ``config`` from start to end; use it once, in the main thread.

    Until the trainer has its model and opens the record, nothing of an earlier run in the output folder is touched but
    its lock and ``logs``.

    Raises:
        MegatronFRError: the output folder cannot be written to, or another run is writing to it.
        ConfigError: there are too few GPUs for trainer and engines.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._output = config.output.resolve()
        self._logs = self._output / "logs"
        self._config_file = str(self._logs / "config.yaml")
        self._url_file = self._output / "service.url"
        self._rank_gpus, self._engine_gpus = _gpu_environments(config)
        self._lock = lock_output(self._output, "run")
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable_output(self._output, error) from error
        save_config(config.model_copy(update={"output": self._output}), self._config_file)
        self._recorded = self._record_size()
        self._signals = 0
        self._service: Child | None = None
        self._ranks: list[Child] = []

    def run(self) -> int:
        """Train; returns the exit status: 0 at the end, 130 after an interruption, 1 after a failure."""
        previous = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        failure: MegatronFRError | None = None
        try:
            try:
                self._run()
            except MegatronFRError as error:
                failure = error
            finally:
                self._end_everything()
            if self._record_size() != self._recorded:  # else the record is of an earlier run
                self._report()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self._lock is not None:
            self._lock.close()
        if failure is not None:
            print(f"error: {failure}", file=sys.stderr, flush=True)  # last, where a person looks first
            return 1
        return 130 if self._signals else 0

    def _run(self) -> None:
        resume = newest_usable(self._output) if self._config.checkpoint.resume == "auto" else None
        if resume is not None:
            check_unchanged(resume, run_settings(self._config))
            print(f"going on from {resume}; checkpoint.resume=never starts anew", flush=True)
        elif self._recorded:
            print(f"{self._output} has the record of an earlier run; this one begins again at update 0", flush=True)
        print(f"starting {self._config.rollout.engines} engine(s); logs in {self._logs}", flush=True)
        started = time.monotonic()
        self._url_file.unlink(missing_ok=True)
        # Held to the end: the ranks bind the port only after their imports, while engines look for ports.
        with lease_free_port("127.0.0.1") as rendezvous:
            service = self._start(resume, rendezvous.port)
            with say_what_is_awaited(lambda: f"the rollout service: {service.last_line()}"):
                while not self._url_file.exists():
                    if self._signals:
                        print("\ninterrupted before training began", flush=True)
                        return
                    if service.process.poll() is not None:
                        raise MegatronFRError(service.reason())
                    raise_failure(service, self._ranks)
                    time.sleep(_POLL_S)
            print(f"engines ready after {time.monotonic() - started:.0f} s", flush=True)
            self._wait_for_ranks()
            raise_failure(service, self._ranks)

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
                print(
                    "\ninterrupted: the trainer ends its update, saves a checkpoint and the weights, and stops, within "
                    f"{grace:g} s (checkpoint.stop_grace_s); Ctrl-C again kills it unsaved",
                    flush=True,
                )
                deadline = time.monotonic() + grace
                for rank in self._ranks:
                    rank.process.terminate()
            if time.monotonic() > deadline or self._signals > 1:
                why = f"did not stop within checkpoint.stop_grace_s={grace:g}"
                why = "was interrupted again before it had saved" if self._signals > 1 else why
                newest = next(iter(all_checkpoints(self._output)), None)
                then = f"goes on from {newest}" if newest else "begins again: there is no training checkpoint yet"
                raise MegatronFRError(f"the trainer {why}, and is killed; the same command {then}")
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
        from megatron_fr.observe.report import report_run  # slow: imports matplotlib

        try:
            print("\n" + report_run(self._output), flush=True)
        except MegatronFRError as error:
            print(f"no report: {error}", file=sys.stderr, flush=True)

    def _record_size(self) -> int:
        path = self._output / METRICS_FILE
        return path.stat().st_size if path.exists() else 0

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
