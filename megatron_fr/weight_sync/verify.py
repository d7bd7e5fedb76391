"""What a push should leave in an engine, and whether it did: the tensors' count and a checksum of every parameter.

An engine takes a tensor whose name it does not know, drops it, and answers with success. Its weight checker
(``/weights_checker``) computes a checksum of each parameter as it is stored, on each TP rank; here the same is computed
from what was sent.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from megatron_fr.errors import SyncError
from megatron_fr.weight_sync.engine_layout import Stored

_NAMED = 3


class PushRecord:
    """Watches the tensors of one push go by.

    Args:
        layout: see :func:`~megatron_fr.weight_sync.engine_layout.engine_layout`.
        tensor_size: TP size of an engine.
        checksums: whether to compute them; off, the tensors are only counted.

    Attributes:
        checksums: for each TP rank the engine's parameters' checksums, 16 hexadecimal digits; complete after
            :meth:`watch` has ended.
        seconds: what they took.
    """

    def __init__(self, layout: Mapping[str, Stored], tensor_size: int, *, checksums: bool) -> None:
        self._layout = layout
        self._tensor_size = tensor_size
        self._wanted = checksums
        self._open: dict[str, list[Checksum]] = {}
        self.checksums: list[dict[str, str]] = [{} for _ in range(tensor_size)]
        self.seconds = 0.0

    def watch(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass the tensors on.

        Raises:
            SyncError: they are not the model's, each once and in its order. Those before the deviation, and never the
                last one, have been passed on.
        """
        names, count = iter(self._layout), 0
        for count, (name, tensor) in enumerate(named, 1):
            expected = next(names, None)
            if name != expected:
                raise SyncError(
                    f"tensor {count} of the push is {name!r}; number {count} of the model's {len(self._layout)} is "
                    f"{expected!r}. The bridge's rules and the model disagree; nothing is served from this push"
                )
            started = time.monotonic()
            if self._wanted:
                self._add(self._layout[name], tensor)
            self.seconds += time.monotonic() - started
            yield name, tensor
        if (missing := next(names, None)) is not None:
            raise SyncError(
                f"the push has {count} tensors, the model {len(self._layout)}; the first that is missing is "
                f"{missing!r}. The bridge's rules and the model disagree; nothing is served from this push"
            )

    def _add(self, stored: Stored, tensor: torch.Tensor) -> None:
        size = self._tensor_size
        sums = self._open.setdefault(stored.param, [Checksum() for _ in range(size)])
        for rank, checksum in enumerate(sums):
            checksum.add(stored.cut(tensor, rank, size))
        if stored.last:
            for rank, checksum in enumerate(self._open.pop(stored.param)):
                self.checksums[rank][stored.param] = checksum.result()

    def made_of(self, param: str) -> str:
        """The tensors that an engine's parameter was made from, in words."""
        names = [name for name, stored in self._layout.items() if stored.param == param]
        if not names:
            return "which no tensor sent belongs to"
        return f"of {names[0]}" if len(names) == 1 else f"of {names[0]} to {names[-1]}"


class Checksum:
    """SGLang's checksum of one tensor, from parts whose bytes are the tensor's: SHA-256 on CPUs, its own hash on GPUs.

    On a GPU the parts are kept until :meth:`result`; the most is one layer's experts.
    """

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self._on_gpu: list[torch.Tensor] = []

    def add(self, part: torch.Tensor) -> None:
        """The next bytes."""
        raw = part.detach().contiguous().view(-1).view(torch.uint8)
        if raw.is_cuda:
            self._on_gpu.append(raw)
        else:
            self._sha.update(memoryview(raw.numpy()))

    def result(self) -> str:
        """16 hexadecimal digits."""
        if not self._on_gpu:
            return self._sha.hexdigest()[:16]
        # Triton kernels, which engines on GPUs use; importing them needs a GPU.
        from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

        return f"{gpu_tensor_hash(torch.cat(self._on_gpu)):016x}"


def difference(record: PushRecord, answer: Any, *, experts: bool) -> str | None:
    """How an engine's checksums differ from what it was sent, or None.

    Args:
        record: of the push.
        answer: of the engine's ``/weights_checker``, action ``checksum``.
        experts: whether to compare the experts' weights too.
    """
    ranks = _by_rank(answer)
    if sorted(ranks) != list(range(len(record.checksums))):
        return f"it answered {str(answer)[:300]}, not with checksums of {len(record.checksums)} TP ranks"
    for rank, sent in enumerate(record.checksums):
        held = ranks[rank]
        compared = [name for name in {**sent, **held} if experts or ".experts." not in name]
        wrong = [name for name in compared if sent.get(name) != held.get(name)]
        if wrong:
            listed = "; ".join(f"{name} ({_kind(sent, held, name)}, {record.made_of(name)})" for name in wrong[:_NAMED])
            where = f" of its TP rank {rank}" if len(record.checksums) > 1 else ""
            return f"{len(wrong)} of {len(compared)} parameters{where} are not what was sent: {listed}" + (
                "; ..." if len(wrong) > _NAMED else ""
            )
    return None


def _by_rank(answer: Any) -> dict[int, dict[str, str]]:
    """Checksums by TP rank; none where the answer has another form."""
    try:
        return {
            int(place["tp_rank"]): dict(rank["checksums"])
            for rank in answer["ranks"]
            for place in rank["parallelism_info"]
        }
    except (KeyError, TypeError, ValueError):
        return {}


def _kind(sent: Mapping[str, str], held: Mapping[str, str], name: str) -> str:
    if name not in held:
        return "not in the engine"
    return "other bytes" if name in sent else "only in the engine"
