"""``python -m megatron_fr.sandbox.check``: ends with the remedy where the Python tool cannot be isolated."""

from __future__ import annotations

import asyncio
import sys

from megatron_fr.config import ToolLimits
from megatron_fr.errors import ToolError
from megatron_fr.sandbox.sandbox import Sandbox


def held_here() -> dict[str, str]:
    """Each measure of the sandbox and how it is held on this machine; ToolError where one is missing."""

    async def check() -> dict[str, str]:
        sandbox = Sandbox(ToolLimits())
        await sandbox.start()
        await sandbox.stop()
        return sandbox.measures

    return asyncio.run(check())


if __name__ == "__main__":
    try:
        held_here()
    except ToolError as error:
        sys.exit(f"error: {error}")
