"""The reward function in its worker process, which imports it once and calls it for one trajectory after another."""

from __future__ import annotations

import ctypes
import inspect
import math
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_fr.agents.contract import RewardInput
from megatron_fr.runtime.importing import import_object, place_of
from megatron_fr.runtime.spawn import PR_SET_PDEATHSIG

FIELD = "reward.function"


@dataclass(frozen=True)
class Scored:
    """How one call went: named parts that hold ``"reward"`` where ``error`` is None; ``output`` is for the log."""

    parts: dict[str, float]
    error: str | None = None
    output: str = ""
    timed_out: bool = False


def prepare(function: str) -> None:
    """Set a new worker up: it reads nothing, ends with its parent, and has the function imported before its first call,
    outside the call's time limit."""
    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))  # with what the function started
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:  # it died before the call above
        os._exit(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    try:
        import_object(function, FIELD)
    except BaseException:  # is_async() and each call raise it again, and can tell of it
        return


def is_async(function: str) -> bool:
    """Whether the function has to be awaited; ConfigError where it cannot be imported."""
    return inspect.iscoroutinefunction(import_object(function, FIELD))


def call(function: str, pickled: bytes, log_path: str) -> Scored:
    """Call the function with a pickled ``(RewardInput, arguments)``; what it prints is appended to ``log_path``."""
    with _printing_to(log_path):
        try:
            episode, arguments = pickle.loads(pickled)
            given: RewardInput = episode
            answer = import_object(function, FIELD)(given, **arguments)
        except BaseException as error:  # the function is the user's code; a sys.exit() ends this call alone
            return failure(error)
    return checked(answer, function)


def failure(error: BaseException) -> Scored:
    """What an exception of the user's code becomes."""
    return Scored({}, f"{type(error).__name__}: {error} ({place_of(error)})", traceback.format_exc())


def checked(answer: Any, source: str) -> Scored:
    """What a reward function or an agent, ``source``, returned, as named parts; a refusal where it is neither a finite
    number nor a mapping of them with ``"reward"``."""
    if answer is None:
        return Scored({}, f"{source} returned None; return a number, or named parts with 'reward'")
    try:
        given = dict(answer) if isinstance(answer, Mapping) else {"reward": answer}
        parts = {str(key): float(value) for key, value in given.items()}
    except (TypeError, ValueError, OverflowError) as error:
        return Scored({}, f"{source} returned what is no number: {type(error).__name__}: {error}")
    if "reward" not in parts:
        return Scored({}, f"{source} returned the parts {sorted(parts)} without 'reward'")
    if taken := {"mean", "pass"} & parts.keys():
        return Scored({}, f"{source} returned the parts {sorted(taken)}, metrics of the reward itself; rename them")
    if wrong := [f"{key}={value}" for key, value in parts.items() if not math.isfinite(value)]:
        return Scored({}, f"{source} returned {', '.join(wrong)}")
    return Scored(parts)


@contextmanager
def _printing_to(path: str) -> Iterator[None]:
    """Append standard output and error to a file, those of started programs and of a crash included."""
    before = [os.dup(1), os.dup(2)]
    with open(path, "ab") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in zip((1, 2), before, strict=True):
            os.dup2(old, number)
            os.close(old)
