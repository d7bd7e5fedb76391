"""Bring the engines to a new version while their generations are paused in place, and check that they hold it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron_fr.errors import MegatronFRError, SyncError
from megatron_fr.weight_sync.transport import TransportContext, make_transport

_NAMED = 3
_UNVERIFIED = "set sync.verify=false to go without this check (the probe of fresh tokens, sync.probe_tokens, remains)"

Named = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class SyncReport:
    """Bytes of one push, and seconds of the check."""

    num_bytes: int
    verify_s: float


class WeightPublisher:
    """Owned by trainer rank 0."""

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._engines = context.engines
        self._transport = make_transport(context)
        self._num_bytes = 0

    def connect(self) -> None:
        """Prepare the transport, or raise SyncError."""
        with self._named():
            self._transport.connect()

    def publish(self, version: int, *pushes: Named) -> SyncReport:
        """Replace the engines' weights and label them ``version``; running generations are paused, not restarted.

        An engine takes a tensor whose name it does not know, drops it, and answers with success. So the first sync has
        two pushes: between them the engines overwrite their weights with random numbers, and afterwards each must hold
        what it held before. At later syncs (one push) the engines must agree with each other.

        Args:
            pushes: the version's tensors, once for each push.

        Raises:
            SyncError: an engine refused, did not answer, or does not hold what was sent; or the tensors are not the
                model's. The engines' weights must then be taken as broken; their generations stay paused.
        """
        verify_s = 0.0
        with self._named():
            self._engines.post("/pause_generation", {"mode": "in_place"})
            self._transport.publish(self._complete(pushes[0]), version)
            if self._context.config.verify and (len(pushes) > 1 or len(self._engines.urls) > 1):
                pushed = time.monotonic()
                self._verify(version, pushes[1:])
                verify_s = time.monotonic() - pushed
            self._engines.post("/continue_generation", {})
        return SyncReport(self._num_bytes, verify_s)

    def close(self) -> None:
        """Leave the engines."""
        self._transport.close()
        self._engines.close()

    def _complete(self, tensors: Named) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass the tensors on; raises SyncError unless they are the model's, each once and in its order."""
        shapes = self._context.shapes
        expected, count, self._num_bytes = iter(shapes.items()), 0, 0
        blame = "The model's table and its parameters disagree; nothing is served from this push"
        for count, (name, tensor) in enumerate(tensors, 1):
            wanted, found = next(expected, None), (name, tuple(tensor.shape))
            if found != wanted:
                raise SyncError(
                    f"tensor {count} of the push is {found}; number {count} of the model's {len(shapes)} is {wanted}. "
                    f"{blame}"
                )
            self._num_bytes += tensor.nbytes
            yield name, tensor
        if (missing := next(expected, None)) is not None:
            raise SyncError(
                f"the push has {count} tensors, the model {len(shapes)}; the first that is missing is {missing}. "
                f"{blame}"
            )

    def _verify(self, version: int, again: Iterable[Named]) -> None:
        urls = self._engines.urls
        try:
            held = self._checksums()
            for push in again:
                self._engines.post("/weights_checker", {"action": "reset_tensors", "selector": "target"})
                self._transport.publish(self._complete(push), version)
                for engine, before, after in zip(urls, held, self._checksums(), strict=True):
                    if wrong := _difference(before, after):
                        raise SyncError(
                            f"version {version} was pushed twice, with random weights between: engine {engine} holds "
                            f"other values after the second push in {wrong}. The pushes do not set these: the engine's "
                            "model does not know their names, see its log"
                        )
        except SyncError as error:
            raise SyncError(f"{error}; {_UNVERIFIED}") from error
        for engine, checksums in zip(urls, held, strict=True):
            if wrong := _difference(held[0], checksums):
                raise SyncError(
                    f"after the push of version {version}, engines {urls[0]} and {engine} differ in {wrong}; see their "
                    "logs"
                )

    def _checksums(self) -> list[dict[str, str]]:
        """Checksums of each engine's parameters by name, without rotary tables and what SGLang computes by itself."""
        tp, checksums = self._context.engine_tp, []
        answers = self._engines.post("/weights_checker", {"action": "checksum", "selector": "target"})
        for engine, answer in zip(self._engines.urls, answers, strict=True):
            try:
                ranks = {place["tp_rank"] for rank in answer["ranks"] for place in rank["parallelism_info"]}
                found = {
                    f"{name} of rank {place['rank']}" if tp > 1 else name: checksum
                    for rank in answer["ranks"]
                    for place in rank["parallelism_info"]
                    for name, checksum in rank["checksums"].items()
                }
            except (KeyError, TypeError, AttributeError):
                ranks, found = set(), {}
            if ranks != set(range(tp)) or not found:
                raise SyncError(
                    f"engine {engine}/weights_checker answered {str(answer)[:300]}, not with checksums of {tp} TP ranks"
                )
            checksums.append(found)
        return checksums

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Turn another exception of a transport into a SyncError that names it."""
        try:
            yield
        except MegatronFRError:
            raise
        except Exception as error:
            transport = self._context.config.transport
            raise SyncError(f"sync.transport={transport}: {type(error).__name__}: {error}") from error


def _difference(first: dict[str, str], second: dict[str, str]) -> str:
    """Names whose checksums differ, with their number; empty where there are none."""
    names = {**first, **second}
    wrong = [name for name in names if first.get(name) != second.get(name)]
    listed = ", ".join(wrong[:_NAMED]) + (", ..." if len(wrong) > _NAMED else "")
    return f"{len(wrong)} of {len(names)} parameters ({listed})" if wrong else ""
