"""One SGLang server: its command line, its start, and its certain end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import aiohttp
import psutil

from megatron_fr.engines.cpu_platform import PLATFORM_NAME
from megatron_fr.errors import ConfigError, EngineError
from megatron_fr.runtime.ports import PortLease, lease_free_port, lease_port
from megatron_fr.runtime.spawn import tied_to_us

#: Server arguments that ``rollout.engine_args`` must not set, and what decides them.
_RESERVED = {
    "model-path": "model.path",
    "host": "rollout.host",
    "port": "rollout.engine_port",
    "tp-size": "rollout.engine_tp",
    "device": "device",
    "weight-version": "the trainer's updates",
    "skip-tokenizer-init": "the rollout service, which works on token ids",
    "config": "the rollout service, for the token",
    "api-key": "the token of the run",
    "admin-api-key": "the token of the run",
}
#: Positions of ``context-length`` that SGLang keeps: it refuses prompts that leave fewer.
_KEPT_POSITIONS = 6
_POLL_S = 0.2
_LOG_LINES = 25
_SOCKET_FOLDER = 60  #: characters of a folder that leave room for a socket's name, of 107 in all


@dataclass(frozen=True)
class EngineSpec:
    """One server: model, place and limits."""

    model_path: str
    log_path: Path
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    host: str = "127.0.0.1"
    port: int = 0  #: 0 takes a free one
    index: int = 0  #: number of the engine in its fleet, which chooses its GPUs
    tensor: int = 1  #: tensor-parallel size
    max_context: int = 8192  #: tokens of the longest sequence
    max_running: int = 64  #: sequences generated at the same time
    return_routes: bool = True
    seed: int = 0
    start_timeout_s: float = 300.0
    token: str | None = None  #: that requests must show; None: no one is refused
    args: Mapping[str, str | int | float | bool] = field(default_factory=dict)  #: more server arguments


def server_args(spec: EngineSpec, port: int, nccl_port: int) -> list[str]:
    """Arguments of ``sglang.launch_server``; raises ConfigError where ``rollout.engine_args`` has a reserved one."""
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
        "log-level-http": "warning",  # no line for each request
        "context-length": spec.max_context + _KEPT_POSITIONS,
        "max-running-requests": spec.max_running,
        "enable-return-routed-experts": spec.return_routes,
    }
    if spec.device == "cpu":
        # Without this limit the token pool takes memory that other processes of a small machine need.
        pool = min(max(16_384, spec.max_running * spec.max_context), max(65_536, 2 * spec.max_context))
        args |= {"attention-backend": "torch_native", "max-total-tokens": pool, "mem-fraction-static": 0.5}
        args["sleep-on-idle"] = True  # otherwise an idle engine takes a whole core
    else:
        args |= {"base-gpu-id": spec.index * spec.tensor}
    for given, value in spec.args.items():
        name = given.strip().lstrip("-").replace("_", "-")
        if name in _RESERVED:
            raise ConfigError(f"rollout.engine_args.{given}={value!r}: {_RESERVED[name]} decides this; remove it")
        args[name] = value
    return [w for n, v in args.items() if v is not False for w in ([f"--{n}"] if v is True else [f"--{n}", str(v)])]


def _environment(spec: EngineSpec) -> dict[str, str]:
    # The engine has a process group of its own, which the trainer's launcher must not configure.
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    # Tools take seconds between turns: a connection that the engine closes meanwhile fails the next request.
    env = {"SGLANG_TIMEOUT_KEEP_ALIVE": "600"} | {n: value for n, value in os.environ.items() if n not in launcher}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    # SGLang asks for this when a recipe uses more positions than the model's configuration names.
    env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    if spec.device == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": "", "SGLANG_PLATFORM": PLATFORM_NAME}
        env.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling for a CPU costs more than it saves
    return env


class Engine:
    """A server process in a session of its own; it dies with this process.

    :meth:`start` must run in a thread that lives as long as the engine, because the kernel ends the engine with it.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.url = ""  #: base address, known once :meth:`start` has begun
        self.ready = False  #: whether :meth:`start` has ended well
        self._leases: list[PortLease] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._family: set[psutil.Process] = set()

    @property
    def pid(self) -> int | None:
        """Process id of the server, or None."""
        return self._process.pid if self._process else None

    async def start(self, *, after_s: float = 0.0) -> None:
        """Start the server after ``after_s`` seconds and wait until it answers.

        Raises:
            EngineError: the port is taken, the server died, or it was not ready in time; nothing is left running.
            ConfigError: ``rollout.engine_args`` sets a reserved argument.
        """
        await asyncio.sleep(after_s)
        try:
            self._launch()
            await self._wait_ready()
        except BaseException:
            await self.stop(grace_s=0)
            raise
        self._note_family()
        self.ready = True

    def last_line(self) -> str:
        """The last line of the log."""
        return self._tail().splitlines()[-1].strip()

    def death(self) -> str | None:
        """Why the server ended (exit code or signal, last lines of its log), or None while it lives."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        reason = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            reason += " (out of memory, killed by hand, or by SGLang after one of its processes died)"
        return f"{reason}; last lines of {self.spec.log_path}:\n{self._tail()}"

    async def stop(self, *, grace_s: float = 1.0) -> None:
        """Send SIGTERM, and after ``grace_s`` seconds SIGKILL to the process tree; takes at most about 3 s."""
        if (process := self._process) is not None:
            self._note_family()
            if process.poll() is None and grace_s > 0:
                process.terminate()
                await self._wait_gone(process, grace_s)
            self._note_family()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for member in self._family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            await self._wait_gone(process, 2.0)
            self._process = None
        for lease in self._leases:
            lease.release()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _launch(self) -> None:
        spec = self.spec
        given = f"rollout.engine_port={spec.port - spec.index}"
        port = lease_port(spec.host, spec.port, given) if spec.port else lease_free_port(spec.host)
        self._leases = [port]
        self._leases.append(nccl_port := lease_free_port(spec.host))
        self.url = f"http://{spec.host}:{port.port}"
        arguments = server_args(spec, port.port, nccl_port.port)
        # SGLang's processes exchange pickles through sockets there: no other user may reach them.
        short = tempfile.gettempdir() if len(tempfile.gettempdir()) < _SOCKET_FOLDER else "/tmp"
        self._temporary = tempfile.TemporaryDirectory(prefix="mfr-", dir=short, ignore_cleanup_errors=True)
        if spec.token is not None:  # in a file: everyone can see a command line
            keys = Path(self._temporary.name) / "keys.yaml"
            keys.write_text(f"api-key: {spec.token}\nadmin-api-key: {spec.token}\n")
            arguments += ["--config", str(keys)]
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with spec.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                tied_to_us([sys.executable, "-m", "sglang.launch_server", *arguments]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(spec) | {"TMPDIR": self._temporary.name},
                start_new_session=True,
            )

    async def _wait_ready(self) -> None:
        spec, http_limit = self.spec, aiohttp.ClientTimeout(total=5)
        try:
            async with asyncio.timeout(spec.start_timeout_s), aiohttp.ClientSession(timeout=http_limit) as http:
                while (death := self.death()) is None:
                    with contextlib.suppress(aiohttp.ClientError, TimeoutError):  # it does not listen yet
                        async with http.get(f"{self.url}/health") as answer:
                            if answer.status == 200:
                                return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise EngineError(
                f"engine {spec.index} ({self.url}) was not ready after rollout.start_timeout_s="
                f"{spec.start_timeout_s:g}; raise it, or see the last lines of {spec.log_path}:\n{self._tail()}"
            ) from None
        raise EngineError(f"engine {spec.index} ({self.url}) died while starting: {death}")

    def _note_family(self) -> None:
        """Remember the descendants; once their parent is gone they cannot be found through it."""
        assert self._process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            self._family.update(psutil.Process(self._process.pid).children(recursive=True))

    async def _wait_gone(self, process: subprocess.Popen[bytes], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while process.poll() is None or any(map(_is_alive, self._family)):
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(0.02)

    def _tail(self) -> str:
        """Last lines of the log, without the usage text that a refused argument prints."""
        try:
            with self.spec.log_path.open(errors="replace") as log:
                secret = self.spec.token or "\0"  # which SGLang logs, with its other arguments
                lines = [line.rstrip().replace(secret, "[token]")[:400] for line in deque(log, maxlen=_LOG_LINES * 4)]
        except OSError as error:
            return f"  (log not readable: {error.strerror})"
        lines = [line for line in lines if line and not line.startswith((" " * 9, "usage:"))] or lines
        return "\n".join(f"  {line}" for line in lines[-_LOG_LINES:]) or "  (the log is empty)"


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
