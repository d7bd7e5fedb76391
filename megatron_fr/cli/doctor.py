"""``megatron-fr doctor``: checks an installation and its machine."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from megatron_fr.engines.cpu_platform import PLATFORM_NAME
from megatron_fr.errors import ToolError
from megatron_fr.sandbox.check import held_here

CONSTRAINTS = Path(__file__).resolve().parents[2] / "launch" / "constraints.txt"
#: Packages that must be installed; for the other pins only versions are compared.
REQUIRED = ("torch", "megatron-core", "sglang", "transformers", "safetensors", "pydantic", "aiohttp", "httpx")

_IMPORT_MEGATRON = """
from megatron_fr.runtime.device import prepare_process, resolve_device
prepare_process(resolve_device("auto"))
import megatron.core, megatron.core.transformer.attention
print(megatron.core.__version__)
"""
_IMPORT_SGLANG = "from sglang.srt.platforms import current_platform; print(current_platform.device_type)"


class Finding(NamedTuple):
    """One line of the table; ``broken`` means that a run would fail."""

    name: str
    status: Literal["ok", "note", "warning", "broken"]
    detail: str


def run() -> int:
    """Print a line for each check; returns the exit code, 1 when something is broken."""
    broken = []
    for check in CHECKS:
        name, status, detail = check()
        print(f"{name:<16} {status:<8} {detail}", flush=True)
        if status == "broken":
            broken.append(name)
    print(f"broken: {', '.join(broken)}" if broken else "ready")
    return 1 if broken else 0


def check_python() -> Finding:
    detail = f"{platform.python_version()}, {sys.executable}"
    if sys.version_info[:2] != (3, 12):
        return Finding("python", "warning", f"{detail}; everything is tested on 3.12: use launch/env.sh")
    return Finding("python", "ok", detail)


def check_packages(constraints: Path = CONSTRAINTS) -> Finding:
    missing = [name for name in REQUIRED if _version(name) is None]
    if missing:
        return Finding("packages", "broken", f"not installed: {', '.join(missing)}; run launch/env.sh")
    if not constraints.exists():
        return Finding("packages", "note", "no launch/constraints.txt beside the package to compare with")
    pins = dict(line.split("==", 1) for line in constraints.read_text().splitlines() if "==" in line and line[0] != "#")
    versions = {name: _version(name) for name in pins}
    other = [f"{n} {v} (pinned {pins[n]})" for n, v in versions.items() if v is not None and v != pins[n]]
    absent = [name for name, version in versions.items() if version is None]
    found = [f"{len(names)} {what}: {_some(names)}" for names, what in ((other, "differ"), (absent, "absent")) if names]
    if not found:
        return Finding("packages", "ok", f"all {len(pins)} as pinned")
    return Finding("packages", "warning", "; ".join(found))


def check_megatron() -> Finding:
    """Import Megatron-Core's attention, which fails where a wheel misses its driver."""
    return try_import("megatron-core", _IMPORT_MEGATRON, "attention imports, version {}")


def check_sglang_plugin() -> Finding:
    for group, name in (("platforms", PLATFORM_NAME), ("plugins", f"{PLATFORM_NAME}_hooks")):
        if name not in importlib.metadata.entry_points(group=f"sglang.srt.{group}").names:
            detail = f"no entry point {name!r}; install this project (launch/env.sh)"
            return Finding("sglang platform", "broken", detail)
    environment = {} if gpu_names() else {"SGLANG_PLATFORM": PLATFORM_NAME, "CUDA_VISIBLE_DEVICES": ""}
    return try_import("sglang platform", _IMPORT_SGLANG, "plugin found, SGLang runs on {}", environment)


def check_gpu() -> Finding:
    if gpus := gpu_names():
        if importlib.metadata.packages_distributions().get("transformer_engine") is None:
            return Finding("gpu", "warning", f"{_some(gpus)}; no Transformer Engine: run launch/env.sh --gpu")
        return Finding("gpu", "ok", _some(gpus))
    if shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi", "-L"], capture_output=True).stdout.strip():
        return Finding("gpu", "broken", "nvidia-smi lists GPUs, torch sees none: check the driver's CUDA version")
    return Finding("gpu", "note", "none: everything runs on the CPU")


def check_memory(available: int | None = None) -> Finding:
    """Check free memory; an engine and a trainer of the tiny model take about 6 GB."""
    gigabytes = (psutil.virtual_memory().available if available is None else available) / 1e9
    detail = f"{gigabytes:.0f} GB free"
    if gigabytes < 8:
        return Finding("memory", "warning", f"{detail}; an engine and a trainer need 8: end other programs")
    return Finding("memory", "ok", detail)


def check_disk(folder: Path | None = None, free: int | None = None) -> Finding:
    folder = folder or Path.cwd()
    gigabytes = (shutil.disk_usage(folder).free if free is None else free) / 1e9
    detail = f"{gigabytes:.0f} GB free at {folder}"
    if not os.access(folder, os.W_OK):
        return Finding("disk", "broken", f"{folder} cannot be written to; set output to another folder")
    if gigabytes < 15:
        return Finding("disk", "warning", f"{detail}; the environment takes 11 GB, checkpoints more")
    return Finding("disk", "ok", detail)


def check_loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        return Finding("loopback", "broken", f"no connection to 127.0.0.1: {error}; engines could not be reached")
    return Finding("loopback", "ok", "127.0.0.1 takes connections")


def check_sandbox() -> Finding:
    """Try each measure in a real call; a run that uses the tool refuses to start where one is missing."""
    try:
        measures = held_here()
    except ToolError as error:
        return Finding("tool sandbox", "warning", str(error))
    return Finding("tool sandbox", "ok", "; ".join(f"{name}: {what}" for name, what in measures.items()))


def check_slurm() -> Finding:
    if (sbatch := shutil.which("sbatch")) is None:
        return Finding("slurm", "note", "no sbatch here: runs stay on this machine")
    try:
        result = subprocess.run([sbatch, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("slurm", "warning", f"{sbatch} does not answer: {error}")
    if result.returncode:
        return Finding("slurm", "warning", f"{sbatch} fails: {_last_line(result.stderr)}")
    return Finding("slurm", "ok", result.stdout.strip())


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python, check_packages, check_gpu, check_memory, check_disk, check_loopback, check_sandbox, check_slurm,
    check_megatron, check_sglang_plugin,
)  # fmt: skip


def try_import(
    name: str, code: str, good: str, environment: dict[str, str] | None = None, timeout_s: float = 180
) -> Finding:
    """Run code in a new interpreter; its last output line fills ``good``."""
    command, env = [sys.executable, "-c", code], {**os.environ, **(environment or {})}
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env)
    except subprocess.TimeoutExpired:
        return Finding(name, "broken", f"the import took more than {timeout_s} s; is the disk that slow?")
    if result.returncode:
        return Finding(name, "broken", _last_line(result.stderr) or f"the import died with code {result.returncode}")
    return Finding(name, "ok", good.format(_last_line(result.stdout)))


def gpu_names() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _version(distribution: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def _some(items: list[str]) -> str:
    return ", ".join(items[:4]) + (f" and {len(items) - 4} more" if len(items) > 4 else "")


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].strip()
