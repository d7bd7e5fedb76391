"""From what a call wrote and how it ended to what agents and rewards read."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field

from megatron_fr.config import ToolLimits

LOST = "the sandbox process died during this call"
_SLACK = 1 << 16
#: Control characters but newline and tab, and the marks that reverse the direction of text: terminals obey them.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class CodeResult:
    """How one piece of code went."""

    output: str  # standard output and error, interleaved; at most output_chars characters and a note
    error: str | None  # the reason of a failure in one line
    timed_out: bool
    seconds: float  # wall time, queueing included
    refused: bool = False  # the sandbox failed, not the code


@dataclass
class Output:
    """The beginning and the end of a call's output; only the size of what lies between."""

    keep: int  # bytes kept at each end
    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    size: int = 0

    def add(self, chunk: bytes) -> None:
        self.size += len(chunk)
        room = max(0, self.keep - len(self.head))
        self.head += chunk[:room]
        self.tail += chunk[room:]
        if (excess := len(self.tail) - self.keep) > _SLACK:
            del self.tail[:excess]

    def text(self, limit: int) -> str:
        """At most ``limit`` characters and a note: three quarters from the beginning, the rest from the end."""
        if self.size == len(self.head) + len(self.tail):
            whole = visible((self.head + self.tail).decode(errors="replace"))
            if len(whole) <= limit:
                return whole
            head, tail, missing = whole, whole, len(whole) - limit
        else:
            head, tail = (visible(part.decode(errors="replace")) for part in (self.head, self.tail))
            missing = self.size - limit
        last = limit // 4
        return f"{head[: limit - last]}\n[... {missing} characters of output cut ...]\n{tail[len(tail) - last :]}"


def visible(text: str) -> str:
    """``text`` with its control characters spelled out; line ends of all systems become newlines."""
    plain = text.replace("\r\n", "\n")
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), plain)


def code_error(status: int, output: str) -> str | None:
    """The reason of a failure in one line; None after a success."""
    if status == 0:
        return None
    lines = output.strip().splitlines()
    if status == 1 and lines:
        return lines[-1][:500]  # of the traceback
    if status > 0:
        return f"exit status {status}"
    names = {int(number): number.name for number in signal.Signals}
    return f"ended by {names.get(-status, f'signal {-status}')}"


def timeout_error(limits: ToolLimits) -> str:
    return f"TimeoutError: the code ran longer than {limits.timeout_s:g} s and was ended"
