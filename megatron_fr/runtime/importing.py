"""One resolver for everything that a user names by import path: agents, rewards, advantages, losses, transports."""

from __future__ import annotations

import importlib
import traceback
from operator import attrgetter
from pathlib import Path
from typing import Any

from megatron_fr.errors import ConfigError

_PACKAGE = str(Path(__file__).parent.parent)


def import_object(path: str, field: str) -> Any:
    """The callable at ``module:name``, whose name may be dotted.

    Args:
        path: as the configuration gives it.
        field: of the configuration, for the error message.

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
    """Module and name of an import path.

    Raises:
        ConfigError: it is none.
    """
    module, _, name = path.partition(":")
    if not (module and name):
        raise refusal(path, field, "is no import path")
    return module, name


def refusal(path: str, field: str, reason: str) -> ConfigError:
    """The one error for an import path that cannot be used."""
    return ConfigError(f"{field}={path!r} {reason}; give module:name of a function or class on PYTHONPATH")


def place_of(error: BaseException) -> str:
    """File and line where the user's code raised ``error``: the first place outside this package, else the last."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in frames if not f.filename.startswith(_PACKAGE)), frames[-1])
    return f"{frame.filename}:{frame.lineno}"
