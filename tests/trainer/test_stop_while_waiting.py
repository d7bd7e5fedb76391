"""A stop request before the rollout service has an address ends every rank, not only the one that got it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.parallel_launch import run_ranks


def wait_for_the_service(folder: Path) -> list[str | None]:
    """What a rank finds: rank 1 alone asked to stop, then rank 0 alone, then an address as given."""
    import torch.distributed as dist

    from megatron_fr.trainer.__main__ import find_service

    dist.init_process_group("gloo")
    rank = dist.get_rank()

    class Stop:
        def __init__(self, rank: int) -> None:
            self.rank, self.asked_at = rank, time.monotonic() + 0.5

        def __bool__(self) -> bool:
            if self.rank == 1 and rank == 0 and time.monotonic() > self.asked_at:
                (folder / "url").write_text("http://service\n")
            return rank == self.rank and time.monotonic() > self.asked_at

    stops: list[Any] = [Stop(1), Stop(0)]
    return [
        find_service(str(folder / "url"), stops[0]),
        find_service(str(folder / "never"), stops[1]),
        find_service("http://given", stops[1]),
    ]


@pytest.mark.slow
def test_ranks_leave_together_or_go_on_together(tmp_path: Path) -> None:
    answers = run_ranks(wait_for_the_service, 2, folder=tmp_path)
    assert answers == [["http://service", None, "http://given"]] * 2
