"""``python -m megatron_fr.trainer --config FILE --service URL [section.field=value ...]``: one trainer rank.

``torchrun``, ``srun`` or MPI start one such process a GPU; alone it is a world of one.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from megatron_fr.checkpoint.store import find_resumed
from megatron_fr.config import load_config
from megatron_fr.errors import MegatronFRError
from megatron_fr.runtime.access import private_files
from megatron_fr.runtime.console import print_any_text, say_what_is_awaited
from megatron_fr.runtime.device import prepare_process, resolve_device


def main() -> int:
    """Run one rank; 0 when it trained to the end or stopped on request, 1 with one clear line otherwise."""
    parser = argparse.ArgumentParser(prog="python -m megatron_fr.trainer")
    parser.add_argument("--config", required=True)
    parser.add_argument("--service", required=True, help="URL of the rollout service, or a file that will hold it")
    parser.add_argument(
        "--resume",
        metavar="DIR|auto|never",
        help="go on from this training checkpoint; auto: from the newest usable one in output, if any; never: start "
        "anew (default: what checkpoint.resume says)",
    )
    parser.add_argument("overrides", nargs="*", help="section.field=value")
    arguments = parser.parse_args()
    print_any_text()
    private_files()
    try:
        config = load_config(arguments.config, arguments.overrides)
        device = resolve_device(config.device)
        prepare_process(device)
        # Only now: these import Megatron-Core, which the device has to be prepared for.
        from megatron_fr.runtime.collectives import from_rank_zero
        from megatron_fr.trainer.distributed import initialize, shutdown
        from megatron_fr.trainer.run import train

        stop = StopRequest()
        info = initialize(config.parallel, device, config.seed, timeout_s=config.sync.timeout_s)
        service_url = find_service(arguments.service, stop)
        if service_url is not None:
            given = arguments.resume or config.checkpoint.resume
            resume = from_rank_zero(lambda: find_resumed(config.output, given))
            folder = train(config, device, info, service_url, stop, resume)
            if info.rank == 0:
                print(f"checkpoint: {folder}", flush=True)
        shutdown()
    except MegatronFRError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


class StopRequest:
    """True once SIGTERM or SIGINT arrived. Only rank 0's counts; the others learn it in a collective."""

    _asked = False

    def __init__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def __bool__(self) -> bool:
        return self._asked

    def _ask(self, *_: Any) -> None:
        self._asked = True


def find_service(given: str, stop: object) -> str | None:
    """The service's address, waited for where a file will hold it; None when rank 0 was asked to stop meanwhile.

    A collective, and the same on every rank: one that left alone would be waited for by the others.
    """
    from megatron_fr.runtime.collectives import from_rank_zero  # imports torch

    def look() -> tuple[bool, str | None]:
        if not stop and Path(given).exists():
            return False, Path(given).read_text().strip()
        time.sleep(0.1)
        return bool(stop), None

    stopped, url = False, given if "://" in given else None
    # To standard error: the command that starts all on one machine says more of what it waits for.
    with say_what_is_awaited(lambda: f"the rollout service, which writes its address to {given}", stream=sys.stderr):
        while not stopped and url is None:
            stopped, url = from_rank_zero(look)
    return url


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is saved and closed. Interpreter teardown takes seconds, and a rank that failed must not wait for the
    # others in an exit handler of the process group.
    os._exit(code)
