"""Transport ``broadcast``: trainer rank 0 and all engine ranks form one process group, and buckets are broadcast."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

import torch
import torch.distributed as dist

from megatron_fr.errors import SyncError
from megatron_fr.runtime.ports import free_port
from megatron_fr.weight_sync.buckets import Bucket, buckets, take_bytes
from megatron_fr.weight_sync.group import join_update_group
from megatron_fr.weight_sync.transport import TransportContext

#: Seconds in which an engine whose broadcast broke off says why.
_REASON_S = 5.0


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
        """Form the group; every engine is asked at once, since each waits for the others.

        Raises:
            SyncError: names the engines that did not join.
        """
        context, urls = self._context, self._engines.urls
        timeout_s = context.config.timeout_s
        port = free_port(context.host)
        self._name = f"megatron_fr_{port}"  # engines may still know the group of an earlier trainer
        body = {"master_address": context.host, "master_port": port, "backend": context.backend}
        body["group_name"] = self._name
        body["world_size"] = world_size = 1 + len(urls) * context.engine_tp
        joining = [
            self._engines.start(url, "/init_weights_update_group", body | {"rank_offset": 1 + i * context.engine_tp})
            for i, url in enumerate(urls)
        ]
        try:
            self._group = join_update_group(
                backend=context.backend,
                host=context.host,
                port=port,
                world_size=world_size,
                rank=0,
                name=self._name,
                timeout_s=timeout_s,
            )
        except RuntimeError as error:  # torch's DistStoreError and gloo's connect errors are RuntimeErrors
            silent = [url for url, future in zip(urls, joining, strict=True) if not future.done() or future.exception()]
            raise SyncError(
                f"weight-update group on {context.host}:{port} did not form within sync.timeout_s={timeout_s:g}; "
                f"engines that did not join: {', '.join(silent) or 'none'} ({error}); for engines that cannot join, "
                "set sync.transport=disk"
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

    def _send(self, bucket: Bucket, version: int | None) -> None:
        first = bucket[0][0]
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
            raise SyncError(f"the broadcast of {first} and following broke off: {error}") from error
        for future in pending:
            future.result()


def _raise_first(pending: list[Future[Any]]) -> None:
    for future in pending:
        if future.done():
            future.result()
