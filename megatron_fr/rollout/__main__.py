"""The rollout service as a process of its own: ``python -m megatron_fr.rollout --config X [section.field=value]``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_fr.checkpoint.store import ROLLOUT_FILE, newest_usable
from megatron_fr.config import RunConfig, load_config
from megatron_fr.errors import MegatronFRError
from megatron_fr.rollout.service import RolloutService
from megatron_fr.runtime.access import private_files, write_token
from megatron_fr.runtime.console import print_any_text
from megatron_fr.runtime.output_lock import lock_output

#: After a failure the trainer asks for its next batch, and must learn the reason, not find a closed port.
_LINGER_S = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT (exit status 0), or until the run cannot go on (1)."""
    parser = argparse.ArgumentParser(prog="python -m megatron_fr.rollout", description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--url-file", type=Path, help="write the service's address here once it is ready")
    parser.add_argument(
        "--restore",
        metavar="FILE|auto|never",
        help="go on from this rollout state of a checkpoint; auto: of the newest usable one in output, if any; never: "
        "start anew (default: what checkpoint.resume says)",
    )
    parser.add_argument("overrides", nargs="*", help="section.field=value")
    args = parser.parse_args(argv)
    print_any_text()
    private_files()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        config = load_config(args.config, args.overrides)
        with lock_output(config.output, "rollout") or contextlib.nullcontext():
            restore = args.restore or config.checkpoint.resume
            if restore == "auto":
                newest = newest_usable(config.output, logging.getLogger(__name__).warning)
                state = newest / ROLLOUT_FILE if newest is not None else None
            else:
                state = Path(restore) if restore != "never" else None
            return asyncio.run(_serve(config, state, args.url_file))
    except MegatronFRError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


async def _serve(config: RunConfig, restore: Path | None, url_file: Path | None) -> int:
    """Run the service until a signal or a failure; returns the exit status."""
    service = RolloutService(config, restore=restore)
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    stopping = asyncio.create_task(asked.wait())
    starting = asyncio.create_task(service.start())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 0
        await starting
        write_token(config.output, service.token)
        print(f"rollout service ready at {service.url}", flush=True)
        if url_file is not None:
            url_file.parent.mkdir(parents=True, exist_ok=True)
            temporary = url_file.with_name(f"{url_file.name}.{os.getpid()}.tmp")
            temporary.write_text(service.url + "\n")
            temporary.replace(url_file)
        waited_for: set[asyncio.Future[Any]] = {service.failure, stopping}
        await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
        if asked.is_set():
            return 0
        print(f"error: {service.failure.result()}", file=sys.stderr, flush=True)
        await asyncio.wait({stopping}, timeout=_LINGER_S)
        return 1
    finally:
        stopping.cancel()
        await service.stop()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All children have ended. Tearing down an interpreter that imported torch takes more than a second.
    os._exit(code)
