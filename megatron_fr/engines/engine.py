"""One SGLang server: its command line, its start, and its certain end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

import aiohttp
import psutil

from megatron_fr.engines.cpu_platform import PLATFORM_NAME
from megatron_fr.errors import ConfigError, EngineError
from megatron_fr.runtime.ports import PortLease, lease_free_port, lease_port
from megatron_fr.runtime.spawn import tied_to_us

#: What the service decides; ``rollout.engine_args`` must not.
_RESERVED = {
    "model-path": "model.path",
    "host": "rollout.host",
    "port": "rollout.engine_port",
    "tp-size": "rollout.engine_tp",
    "device": "device",
    "weight-version": "the trainer's updates",
    "skip-tokenizer-init": "the rollout service, which works on token ids",
}
_POLL_S = 0.2
_LOG_LINES = 25


@dataclass(frozen=True)
class EngineSpec:
    """What one server serves and where.

    Attributes:
        index: of the engine in its fleet; numbers its log and its GPUs.
        port: 0 takes a free one.
        max_context: tokens of the longest sequence.
        max_running: sequences that are generated at once.
        args: further server arguments without the leading dashes; they win over this project's defaults.
    """

    model_path: str
    log_path: Path
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    host: str = "127.0.0.1"
    port: int = 0
    index: int = 0
    tensor: int = 1
    max_context: int = 8192
    max_running: int = 64
    return_routes: bool = True
    seed: int = 0
    start_timeout_s: float = 300.0
    args: Mapping[str, str | int | float | bool] = field(default_factory=dict)


def server_args(spec: EngineSpec, port: int, nccl_port: int) -> list[str]:
    """The arguments of ``sglang.launch_server``.

    Raises:
        ConfigError: ``rollout.engine_args`` sets something that another field decides.
    """
    args: dict[str, str | int | float | bool] = {
        "model-path": spec.model_path,
        "device": spec.device,
        "dtype": spec.dtype,
        "host": spec.host,
        "port": port,
        "nccl-port": nccl_port,
        "tp-size": spec.tensor,
        "weight-version": "0",
        "random-seed": spec.seed,
        "skip-tokenizer-init": True,
        "skip-server-warmup": True,
        "log-level-http": "warning",  # a line a request would bury what matters
        # SGLang keeps two positions of a context for itself.
        "context-length": spec.max_context + 2,
        "max-running-requests": spec.max_running,
        "enable-return-routed-experts": spec.return_routes,
    }
    if spec.device == "cpu":
        # Uncapped, the token pool takes gigabytes that other processes of a small machine need.
        pool = min(max(16_384, spec.max_running * spec.max_context), max(65_536, 2 * spec.max_context))
        args |= {"attention-backend": "torch_native", "max-total-tokens": pool, "mem-fraction-static": 0.5}
        args |= {"sleep-on-idle": True}  # else an engine that waits (not one that is paused) takes a whole core
    else:
        args |= {"base-gpu-id": spec.index * spec.tensor}
    for given, value in spec.args.items():
        name = given.strip().lstrip("-").replace("_", "-")
        if name in _RESERVED:
            raise ConfigError(f"rollout.engine_args.{given}={value!r}: {_RESERVED[name]} decides this; remove it")
        args[name] = value
    words: list[str] = []
    for name, value in args.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False:
            words += [f"--{name}", str(value)]
    return words


def environment(spec: EngineSpec) -> dict[str, str]:
    """The environment of the server process."""
    env = dict(os.environ)
    env["OMP_NUM_THREADS"] = "1"
    env["PYTHONUNBUFFERED"] = "1"
    # A recipe may use more positions than the model's configuration names; SGLang then insists on this.
    env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    # Turns are seconds apart while tools run: a connection that the engine closes meanwhile fails the next request.
    env.setdefault("SGLANG_TIMEOUT_KEEP_ALIVE", "600")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)  # of the trainer's launcher, not of the engine's own process group
    root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    if spec.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
        env["SGLANG_PLATFORM"] = PLATFORM_NAME
        env.setdefault("TORCHDYNAMO_DISABLE", "1")  # as in the trainer: compiling for a CPU costs more than it saves
    return env


class Engine:
    """A server process in a session of its own; it dies with this process.

    :meth:`start` must run in a thread that lives as long as the engine: the kernel ends the engine with that thread.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._leases: list[PortLease] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._family: list[psutil.Process] = []

    @property
    def url(self) -> str:
        """Base address, known once :meth:`start` has begun."""
        if not self._leases:
            raise EngineError(f"engine {self.spec.index} has no port: it was not started")
        return f"http://{self.spec.host}:{self._leases[0].port}"

    @property
    def pid(self) -> int | None:
        """Process id of the server, or None before the start."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            EngineError: the model folder is missing, the port is taken, the server died (with its exit code or signal
                and the last lines of its log), or was not ready in time. Nothing is left running then.
            ConfigError: an argument in ``rollout.engine_args`` is reserved.
        """
        spec = self.spec
        _check_model(spec.model_path)
        try:
            self._reserve_ports()
            self._launch()
            await self._wait_ready()
        except BaseException:
            await self.stop(grace_s=0)
            raise
        self._note_family()

    def death(self) -> str | None:
        """How the server ended (exit code or signal, last lines of its log), or None while it lives."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        return f"{_describe_exit(code)}; last lines of {self.spec.log_path}:\n{self._tail()}"

    async def stop(self, *, grace_s: float = 1.0) -> None:
        """SIGTERM, after ``grace_s`` SIGKILL of the whole process tree; returns when nothing is left (at most ~3 s)."""
        process = self._process
        if process is not None:
            self._note_family()
            if process.poll() is None and grace_s > 0:
                _signal(process.pid, signal.SIGTERM)
                await _until(lambda: process.poll() is not None and not self._living(), grace_s)
            self._note_family()
            with _gone_is_fine():
                os.killpg(process.pid, signal.SIGKILL)
            for member in self._living():
                _signal(member.pid, signal.SIGKILL)
            await _until(lambda: process.poll() is not None and not self._living(), 2.0)
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None
        for lease in self._leases:
            lease.release()

    def _reserve_ports(self) -> None:
        spec = self.spec
        if spec.port:
            first = lease_port(spec.host, spec.port, f"rollout.engine_port={spec.port - spec.index}")
        else:
            first = lease_free_port(spec.host)
        self._leases = [first]
        self._leases.append(lease_free_port(spec.host))

    def _launch(self) -> None:
        spec = self.spec
        port, nccl_port = (lease.port for lease in self._leases)
        arguments = server_args(spec, port, nccl_port)
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = spec.log_path.open("wb")
        self._process = subprocess.Popen(
            tied_to_us([sys.executable, "-m", "sglang.launch_server", *arguments]),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment(spec),
            start_new_session=True,
        )

    async def _wait_ready(self) -> None:
        spec = self.spec
        deadline = time.monotonic() + spec.start_timeout_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http:
            while True:
                if (death := self.death()) is not None:
                    raise EngineError(f"engine {spec.index} ({self.url}) died while starting: {death}")
                try:
                    async with http.get(f"{self.url}/health") as answer:
                        if answer.status == 200:
                            return
                except (aiohttp.ClientError, TimeoutError):
                    pass  # not listening yet: that is what is waited for
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"engine {spec.index} ({self.url}) was not ready after rollout.start_timeout_s="
                        f"{spec.start_timeout_s:g}; raise it, or see the last lines of {spec.log_path}:\n{self._tail()}"
                    )
                await asyncio.sleep(_POLL_S)

    def _note_family(self) -> None:
        """Remember the descendants: once their parent is gone they can no longer be found through it."""
        if self._process is None:
            return
        with _gone_is_fine():
            root = psutil.Process(self._process.pid)
            known = {p.pid for p in self._family}
            self._family += [p for p in root.children(recursive=True) if p.pid not in known]

    def _living(self) -> list[psutil.Process]:
        return [p for p in self._family if p.is_running() and _status(p) != psutil.STATUS_ZOMBIE]

    def _tail(self) -> str:
        """The end of the log, from the last Python traceback's error on when there is one."""
        try:
            with self.spec.log_path.open(errors="replace") as log:
                lines = [line.rstrip()[:400] for line in deque(log, maxlen=_LOG_LINES * 4)]
        except OSError as error:
            return f"  (log not readable: {error.strerror})"
        # A refused argument prints a screenful of usage before the one line that matters.
        lines = [line for line in lines if line and not line.startswith((" " * 9, "usage:"))] or lines
        return "\n".join(f"  {line}" for line in lines[-_LOG_LINES:]) or "  (the log is empty)"


def _check_model(path: str) -> None:
    looks_like_path = path.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path)
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise EngineError(f"model.path={path!r} has no config.json; give the folder of a Hugging Face model")
    elif looks_like_path:
        raise EngineError(f"model.path={path!r} is no folder; give the folder of a Hugging Face model, or a hub name")


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    if name == "SIGKILL":
        return f"signal {name} (out of memory, killed by hand, or by SGLang after one of its processes died)"
    return f"signal {name}"


def _gone_is_fine() -> contextlib.AbstractContextManager[None]:
    return contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess)


def _signal(pid: int, number: signal.Signals) -> None:
    with _gone_is_fine():
        os.kill(pid, number)


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_ZOMBIE)


async def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True
