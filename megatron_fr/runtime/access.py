"""The secret of a run's rollout service and engines: a file in its output folder that only its user reads."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from megatron_fr.errors import MegatronFRError

TOKEN_FILE = "service.token"


def private_files() -> None:
    """What this process and its children write from here on is its user's alone: model output, prompts, the token."""
    os.umask(0o077)


def write_token(output: Path, token: str) -> None:
    """Write ``token`` with mode 0600, whatever the umask."""
    output.mkdir(parents=True, exist_ok=True)
    temporary = output / f"{TOKEN_FILE}.{os.getpid()}.tmp"
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(token + "\n")
    temporary.replace(output / TOKEN_FILE)


def read_token(output: Path) -> str:
    """The token that the run's rollout service wrote before its address.

    Raises:
        MegatronFRError: it cannot be read.
    """
    try:
        return (output / TOKEN_FILE).read_text().strip()
    except OSError as error:
        raise MegatronFRError(
            f"{output / TOKEN_FILE}: {error.strerror}; start the rollout service with the same output, as the same user"
        ) from error


def bearer(token: str | None) -> dict[str, str]:
    """The header that shows ``token``; none without one."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def shows(header: str | None, token: str) -> bool:
    """Whether an Authorization header shows ``token``, compared in constant time."""
    shown = (header or "").encode(errors="surrogateescape")  # as the server decodes bytes that are no UTF-8
    return hmac.compare_digest(shown, bearer(token)["Authorization"].encode())
