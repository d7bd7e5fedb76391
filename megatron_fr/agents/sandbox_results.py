"""From the zygote's reports to results that agents and rewards read."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from typing import Any

from megatron_fr.config import ToolLimits

LOST = "the sandbox process died during this call"


@dataclass(frozen=True)
class CodeResult:
    """How one piece of code went."""

    output: str  # standard output and error, interleaved; at most output_chars characters and a note
    error: str | None  # the reason of a failure in one line
    timed_out: bool
    seconds: float  # wall time, queueing included


@dataclass(frozen=True)
class CallResult:
    """How one function call went: ``value`` when ``error`` is None; ``output`` is what it printed."""

    value: Any
    error: str | None
    timed_out: bool
    output: str


def code_result(report: dict[str, Any], limits: ToolLimits, seconds: float) -> CodeResult:
    return CodeResult(
        _cut(report, limits.output_chars), _code_error(report, limits), bool(report.get("timed_out")), seconds
    )


def call_result(report: dict[str, Any], timeout_s: float) -> CallResult:
    output = _cut(report, 4096)
    if report.get("timed_out"):
        return CallResult(None, f"took longer than {timeout_s:g} s", True, output)
    if (refused := report.get("refused")) is not None:
        return CallResult(None, refused, False, output)
    try:
        answer = json.loads(report["answer"])
    except ValueError:
        return CallResult(None, f"its process ended without an answer ({_death(report['status'])})", False, output)
    return CallResult(answer.get("value"), answer.get("error"), False, output)


def _cut(report: dict[str, Any], limit: int) -> str:
    """At most ``limit`` characters and a note: three quarters from the beginning, the rest from the end."""
    head, tail, dropped = report.get("head", ""), report.get("tail", ""), report.get("dropped", 0)
    if not dropped and len(head) <= limit:
        return str(head)
    last = limit // 4
    end = tail or head
    missing = len(head) + len(tail) + dropped - limit
    return f"{head[: limit - last]}\n[... {missing} characters of output cut ...]\n{end[len(end) - last :]}"


def _code_error(report: dict[str, Any], limits: ToolLimits) -> str | None:
    if report.get("timed_out"):
        return f"TimeoutError: the code ran longer than {limits.timeout_s:g} s and was ended"
    if (refused := report.get("refused")) is not None:
        return str(refused)
    status = report["status"]
    if status == 0:
        return None
    lines = (report["tail"] or report["head"]).strip().splitlines()
    if status == 1 and lines:
        return str(lines[-1])[:500]  # of the traceback
    return _death(status)


def _death(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"ended by {name}"
