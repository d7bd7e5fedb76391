"""Push the trainer's weights to the engines while their generations are paused in place.

Trainer rank 0 and all engine ranks form one process group. Rank 0 announces each bucket over HTTP and broadcasts it.
Before the generations go on, the engines say what they hold: see :mod:`megatron_fr.weight_sync.verify`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import torch
import torch.distributed as dist

from megatron_fr.errors import SyncError
from megatron_fr.runtime.ports import free_port
from megatron_fr.weight_sync.buckets import Bucket, buckets
from megatron_fr.weight_sync.engine_layout import Stored, uncheckable, uncheckable_experts
from megatron_fr.weight_sync.group import join_update_group
from megatron_fr.weight_sync.verify import PushRecord, difference

log = logging.getLogger(__name__)

_UNVERIFIED = "set sync.verify=false to go without this check (the probe of fresh tokens, sync.probe_tokens, remains)"


@dataclass(frozen=True)
class SyncReport:
    """What one sync took; ``verify_s``, of comparing checksums, is part of ``seconds``."""

    version: int
    seconds: float
    num_bytes: int
    num_tensors: int
    verify_s: float


class WeightPublisher:
    """Owned by trainer rank 0.

    Args:
        engines: base URLs.
        layout: of the model in the engines, every tensor that a push must have; see
            :func:`~megatron_fr.weight_sync.engine_layout.engine_layout`.
        verify: compare a checksum of every parameter of every engine with what was sent.
        dtype: of the tensors, torch's name without the prefix.
        engine_world_size: ranks of one engine (its TP size).
        backend: "nccl" or "gloo".
        host: this machine's address as the engines reach it.
        max_bucket_bytes: memory of one bucket, bytes.
        timeout_s: of the rendezvous and of every request and broadcast.
    """

    def __init__(
        self,
        engines: Sequence[str],
        *,
        layout: Mapping[str, Stored],
        verify: bool,
        dtype: str,
        engine_world_size: int,
        backend: str,
        host: str,
        max_bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        self._engines = list(engines)
        self._layout = layout
        self._dtype = dtype
        self._verify = verify
        #: Engines whose checksums are compared, and whether those of experts are.
        self._checked: dict[str, bool] = {}
        self._engine_world_size = engine_world_size
        self._backend = backend
        self._host = host
        self._max_bucket_bytes = max_bucket_bytes
        self._timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = None
        self._group_name = "megatron_fr_weights"
        self._http = httpx.Client(timeout=timeout_s, trust_env=False)
        self._threads = ThreadPoolExecutor(max_workers=max(1, len(self._engines)), thread_name_prefix="weight-sync")

    def connect(self) -> None:
        """Form the group; every engine is asked at once, since each waits for the others.

        Raises:
            SyncError: names the engines that did not join.
        """
        port = free_port(self._host)
        world_size = 1 + len(self._engines) * self._engine_world_size
        joining = [
            self._post(
                engine,
                "/init_weights_update_group",
                {
                    "master_address": self._host,
                    "master_port": port,
                    "rank_offset": 1 + i * self._engine_world_size,
                    "world_size": world_size,
                    "group_name": self._group_name,
                    "backend": self._backend,
                },
            )
            for i, engine in enumerate(self._engines)
        ]
        try:
            self._group = join_update_group(
                backend=self._backend,
                host=self._host,
                port=port,
                world_size=world_size,
                rank=0,
                name=self._group_name,
                timeout_s=self._timeout_s,
            )
        except RuntimeError as error:  # torch's DistStoreError and gloo's connect errors are RuntimeErrors
            silent = [e for e, f in zip(self._engines, joining, strict=True) if not f.done() or f.exception()]
            raise SyncError(
                f"weight-update group on {self._host}:{port} did not form within {self._timeout_s:.0f} s; "
                f"engines that did not join: {', '.join(silent) or 'none'} ({error})"
            ) from error
        self._wait(joining)
        if self._verify:
            infos = [self._threads.submit(self._request, "GET", engine, "/server_info") for engine in self._engines]
            self._checked = self._checkable(self._wait(infos))

    def publish(self, named: Iterable[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        """Replace the engines' weights and label them ``version``; running generations are paused, not restarted.

        Raises:
            SyncError: an engine refused, did not answer, or holds something else than was sent; or ``named`` are not
                the model's tensors. The engines' weights must then be taken as broken; their generations stay paused.
        """
        if self._group is None:
            raise SyncError("publish before connect: no weight-update group")
        started = time.monotonic()
        num_bytes = num_tensors = 0
        self._all("/pause_generation", {"mode": "in_place"})
        self._all("/begin_weight_update", {})
        record = PushRecord(self._layout, self._engine_world_size, checksums=bool(self._checked))
        for bucket, last in _mark_last(buckets(record.watch(named), max_bytes=self._max_bucket_bytes)):
            num_bytes += bucket.num_bytes
            num_tensors += len(bucket.names)
            self._send(bucket, version if last else None)
        self._all("/end_weight_update", {})
        verify_s = record.seconds + self._compare(record, version)
        self._all("/continue_generation", {})
        return SyncReport(version, time.monotonic() - started, num_bytes, num_tensors, verify_s)

    def close(self) -> None:
        """Leave the group (the engines notice when they next use it) and end the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._http.close()
        self._group = None

    def _send(self, bucket: Bucket, version: int | None) -> None:
        body: dict[str, Any] = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": self._group_name,
            "load_format": "flattened_bucket",
            # The prefix cache is keyed by version (see engines/client.py), and a flush is refused while requests run.
            "flush_cache": False,
        }
        if version is not None:
            body["weight_version"] = str(version)
        pending = [self._post(engine, "/update_weights_from_distributed", body) for engine in self._engines]
        work = dist.broadcast(bucket.payload(), src=0, group=self._group, async_op=True)
        assert work is not None
        # An engine that refuses the bucket never joins the broadcast: raise its reason instead of waiting it out.
        while not work.is_completed():
            for future in pending:
                if future.done():
                    future.result()
            time.sleep(0.0005)
        work.wait()
        self._wait(pending)

    def _checkable(self, infos: Sequence[Any]) -> dict[str, bool]:
        checked: dict[str, bool] = {}
        for engine, info in zip(self._engines, infos, strict=True):
            if (reason := uncheckable(info, self._dtype)) is not None:
                log.warning("engine %s: no checksum of its weights is compared, because of its %s", engine, reason)
                continue
            experts = uncheckable_experts(info)
            checked[engine] = experts is None
            if experts is not None and any(stored.expert for stored in self._layout.values()):
                log.warning("engine %s: no checksum of its experts is compared, because of its %s", engine, experts)
        return checked

    def _compare(self, record: PushRecord, version: int) -> float:
        """Compare what the engines hold with what was sent; returns the seconds that it took."""
        started = time.monotonic()
        body = {"action": "checksum", "selector": "target"}
        try:
            answers = self._wait([self._post(engine, "/weights_checker", body) for engine in self._checked])
        except SyncError as error:
            raise SyncError(f"after the push of version {version}: {error}; {_UNVERIFIED}") from error
        for (engine, experts), answer in zip(self._checked.items(), answers, strict=True):
            problem = difference(record, answer, experts=experts)
            if problem is not None:
                raise SyncError(
                    f"after the push of version {version}, engine {engine} does not hold it: {problem}. Its model does "
                    "not know these names, or stores them in a layout that is not known here: see its log for what it "
                    f"did not load, use the SGLang release of launch/constraints.txt, or {_UNVERIFIED}"
                )
        return time.monotonic() - started

    def _all(self, path: str, body: dict[str, Any]) -> None:
        self._wait([self._post(engine, path, body) for engine in self._engines])

    def _post(self, engine: str, path: str, body: dict[str, Any]) -> Future[Any]:
        return self._threads.submit(self._request, "POST", engine, path, body)

    def _request(self, method: str, engine: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer's JSON, None where it is none."""
        try:
            response = self._http.request(method, engine + path, json=body)
        except httpx.HTTPError as error:
            raise SyncError(f"engine {engine}{path}: {type(error).__name__}: {error}") from error
        try:
            answer = response.json()
        except json.JSONDecodeError:
            answer = None
        problem = _problem(response, answer)
        if problem is not None:
            raise SyncError(f"engine {engine}{path}: {problem}")
        return answer

    def _wait(self, pending: Sequence[Future[Any]]) -> list[Any]:
        return [future.result(timeout=self._timeout_s) for future in pending]


def _problem(response: httpx.Response, body: Any) -> str | None:
    """Why an answer is a failure: SGLang also says ``success: false`` with status 200."""
    if response.status_code != 200:
        return f"HTTP {response.status_code}: {response.text[:500]}"
    if isinstance(body, dict) and body.get("success") is False:
        return str(body.get("message", "success is false"))
    return None


def _mark_last(items: Iterator[Bucket]) -> Iterator[tuple[Bucket, bool]]:
    previous: Bucket | None = None
    for item in items:
        if previous is not None:
            yield previous, False
        previous = item
    if previous is not None:
        yield previous, True
