"""The process group of trainer rank 0 and all engine ranks, beside the trainer's own groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

c10d: Any = distributed_c10d  # its private parts are not typed for use outside


def join_update_group(
    *, backend: str, host: str, port: int, world_size: int, rank: int, name: str, timeout_s: float
) -> dist.ProcessGroup:
    """Join a group whose members have different default groups.

    ``torch.distributed.new_group`` only makes subsets of the default group, so this goes one level lower, in the way
    in which SGLang's engines join (their store prefix is the group's name); ranks are the members' own.

    Raises:
        torch.distributed.DistStoreError: a member did not come within ``timeout_s``.
    """
    limit = timedelta(seconds=timeout_s)
    store, rank, world_size = next(c10d.rendezvous(f"tcp://{host}:{port}", rank, world_size, timeout=limit))
    store.set_timeout(limit)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=name,
        timeout=limit,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    made: dist.ProcessGroup = group
    return made
