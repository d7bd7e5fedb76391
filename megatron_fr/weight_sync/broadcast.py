"""Transport ``broadcast``: trainer rank 0 and all engine ranks form one process group, and buckets are broadcast."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_fr.errors import SyncError
from megatron_fr.runtime.ports import free_port
from megatron_fr.weight_sync.buckets import Bucket, buckets, take_bytes
from megatron_fr.weight_sync.transport import TransportContext

#: Seconds in which an engine whose broadcast broke off says why.
_REASON_S = 5.0
_c10d: Any = distributed_c10d  # its private parts have no types


class BroadcastTransport:
    """Rank 0 announces each bucket over HTTP and broadcasts it; the last one carries the version.

    A push that fails half-way leaves engines with weights of two versions: they stay paused, under the old version.
    """

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._engines = context.engines
        self._group: dist.ProcessGroup | None = None
        self._name = ""

    def connect(self) -> None:
        """Form the group, or raise SyncError with the engines that did not join."""
        context, urls = self._context, self._engines.urls
        port = free_port(context.host)
        self._name = f"megatron_fr_{port}"  # engines may still know the group of an earlier trainer
        world_size = 1 + len(urls) * context.engine_tp
        body = {"master_address": context.host, "master_port": port, "backend": context.backend}
        body |= {"group_name": self._name, "world_size": world_size}
        joining = [  # all at once: each waits for the others
            self._engines.start(url, "/init_weights_update_group", body | {"rank_offset": 1 + i * context.engine_tp})
            for i, url in enumerate(urls)
        ]
        try:
            self._group = self._join(f"tcp://{context.host}:{port}", world_size)
        except RuntimeError as error:  # torch's DistStoreError and gloo's connect errors are RuntimeErrors
            silent = [url for url, future in zip(urls, joining, strict=True) if not future.done() or future.exception()]
            raise SyncError(
                f"weight-update group on {context.host}:{port} did not form within sync.timeout_s="
                f"{context.config.timeout_s:g}; engines that did not join: {', '.join(silent) or 'none'} ({error}); "
                "for engines that cannot join, set sync.transport=disk"
            ) from error
        for future in joining:
            future.result()

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See :class:`~megatron_fr.weight_sync.transport.Transport`."""
        self._engines.post("/begin_weight_update", {})
        left = len(self._context.shapes)
        for bucket in buckets(tensors, max_bytes=self._context.config.bucket_mb * 2**20):
            left -= len(bucket)
            self._send(bucket, version if left == 0 else None)
        self._engines.post("/end_weight_update", {})

    def close(self) -> None:
        """Leave the group; the engines notice when they next use it."""
        self._group = None

    def _join(self, address: str, world_size: int) -> Any:
        """Join, as rank 0, a group whose members have different default groups.

        ``torch.distributed.new_group`` only makes subsets of the default group. SGLang's engines join in the same way:
        their store prefix is the group's name, and ranks are the members' own.
        """
        limit = timedelta(seconds=self._context.config.timeout_s)
        store, rank, _ = next(_c10d.rendezvous(address, 0, world_size, timeout=limit))
        store.set_timeout(limit)
        backend, prefixed = _c10d.Backend(self._context.backend), _c10d.PrefixStore(self._name, store)
        group, _ = _c10d._new_process_group_helper(
            world_size, rank, [], backend, prefixed, group_name=self._name, timeout=limit
        )
        _c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
        return group

    def _send(self, bucket: Bucket, version: int | None) -> None:
        body: dict[str, Any] = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            # The prefix cache is keyed by version (see engines/client.py), and a flush is refused while requests run.
            "flush_cache": False,
        }
        if version is not None:
            body["weight_version"] = str(version)
        pending = [self._engines.start(url, "/update_weights_from_distributed", body) for url in self._engines.urls]
        try:
            work = dist.broadcast(take_bytes(bucket), src=0, group=self._group, async_op=True)
            assert work is not None
            # An engine that refuses the bucket never joins the broadcast: raise its reason instead of waiting it out.
            while not work.is_completed():
                _raise_first(pending)
                time.sleep(0.0005)
            work.wait()
        except RuntimeError as error:  # of the backend: a member is gone
            wait(pending, timeout=_REASON_S, return_when=FIRST_EXCEPTION)
            _raise_first(pending)
            raise SyncError(f"the broadcast of {body['names'][0]} and following broke off: {error}") from error
        for future in pending:
            future.result()


def _raise_first(pending: list[Future[Any]]) -> None:
    for future in pending:
        if future.done():
            future.result()
