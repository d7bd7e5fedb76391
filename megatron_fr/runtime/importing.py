"""One resolver for agents, rewards, advantages, losses and transports that a user names by import path."""

from __future__ import annotations

import importlib
import traceback
from operator import attrgetter
from pathlib import Path
from typing import Any

from megatron_fr.errors import ConfigError

_PACKAGE = str(Path(__file__).parent.parent)


def import_object(path: str, field: str) -> Any:
    """Import the callable at ``module:name``, whose name may be dotted; ``field`` is that of the configuration.

    Raises:
        ConfigError: the path is malformed, cannot be imported, or names nothing that can be called.
    """
    module, name = split_path(path, field)
    try:
        target = attrgetter(name)(importlib.import_module(module))
    except Exception as error:  # the user's module may raise anything while it is imported
        raise refusal(path, field, f"cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(target):
        raise refusal(path, field, "is not callable")
    return target


def split_path(path: str, field: str) -> tuple[str, str]:
    """Split an import path into module and name; raises ConfigError for a malformed one."""
    module, _, name = path.partition(":")
    if not (module and name):
        raise refusal(path, field, "is no import path")
    return module, name


def refusal(path: str, field: str, reason: str) -> ConfigError:
    return ConfigError(f"{field}={path!r} {reason}; give module:name of a function or class on PYTHONPATH")


def place_of(error: BaseException) -> str:
    """Find file and line where the user's code raised ``error``: the first outside this package, else the last."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in frames if not f.filename.startswith(_PACKAGE)), frames[-1])
    return f"{frame.filename}:{frame.lineno}"
