"""Choosing the training checkpoint to go on from, with the checking of its files shared among the ranks.

A checkpoint of hundreds of gigabytes takes longer to read than a collective may last, so ranks read in threads and
meet in short collectives until all are through.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch.distributed as dist

from megatron_fr.checkpoint import store as checkpoints
from megatron_fr.checkpoint.manifest import SumCheck, announce, check_sizes, shares
from megatron_fr.config import RunConfig
from megatron_fr.errors import CheckpointError
from megatron_fr.runtime.collectives import from_rank_zero

#: Seconds between two collectives; the first ones come faster.
_POLL_S = 2.0
#: A rank; several share a machine.
_THREADS = 4


def folder_to_resume(config: RunConfig, given: str | None, *, checked: bool = False) -> Path | None:
    """The checkpoint to go on from, None to start anew; a collective.

    Args:
        given: a folder; ``auto`` for the newest usable one in ``output``; ``never`` for none; None: what
            ``checkpoint.resume`` says.
        checked: the folder's checksums have been compared already.

    Raises:
        CheckpointError: the folder, or each of those in ``output``, is damaged or cannot be read.
    """
    given = given or config.checkpoint.resume
    if given == "never":
        return None
    if given != "auto":
        folder = Path(given)
        if not checked and (reason := problem(folder)) is not None:
            raise CheckpointError(f"checkpoint {folder} cannot be gone on from: {reason}; choose another one")
        return folder
    say = partial(print, flush=True)
    folders = from_rank_zero(lambda: checkpoints.candidates(config.output, say))
    return checkpoints.first_usable(folders, say if dist.get_rank() == 0 else lambda _: None, problem)


def problem(folder: Path) -> str | None:
    """:func:`megatron_fr.checkpoint.store.problem` by all ranks together; the same answer on each."""
    try:
        entries = from_rank_zero(lambda: check_sizes(folder))
        from_rank_zero(lambda: checkpoints.read_record(folder))
    except CheckpointError as error:
        return str(error)
    if dist.get_rank() == 0:
        announce(folder, entries, partial(print, flush=True))
    reason, wait_s = None, 0.05
    with SumCheck(folder, shares(entries, dist.get_world_size())[dist.get_rank()], _THREADS) as sums:
        while True:
            through = False
            try:
                through = sums.through(within_s=wait_s)
            except CheckpointError as error:
                reason = str(error)
            found: list[tuple[bool, str | None]] = [(False, None)] * dist.get_world_size()
            dist.all_gather_object(found, (through, reason))
            if reasons := [text for _, text in found if text is not None]:
                return reasons[0]
            if all(done for done, _ in found):
                return None
            wait_s = min(2 * wait_s, _POLL_S)
