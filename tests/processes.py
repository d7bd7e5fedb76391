"""Processes that tests start."""

from __future__ import annotations

import os
import sys

from megatron_fr.rollout import spawn


def tied_to_us(command: list[str]) -> list[str]:
    """The command, which the kernel kills when the tests end without having ended it."""
    return [sys.executable, spawn.__file__, str(os.getpid()), *command]
