"""Writing and reading one checkpoint folder with ``torch.distributed.checkpoint``.

While training goes on, a thread of each rank writes that rank's file from a copy in host memory. The files are what
Megatron calls ``torch_dist``.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from concurrent import futures
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.utils._pytree import tree_map

from megatron_fr.checkpoint.reader import CheckedReader
from megatron_fr.checkpoint.state import Pieces, Trained, adam_step, local_pieces, set_adam_step
from megatron_fr.errors import CheckpointError, ModelError
from megatron_fr.runtime.collectives import from_rank_zero

#: Ranks may finish their files this far apart.
_WRITE_TIMEOUT = timedelta(days=1)
_POLL_S = 0.5
#: Megatron's readers need this entry, which here is empty.
_COMMON = "common_state/shard_0_1"


class BackgroundWriter:
    """Writes one checkpoint at a time. Every method is a collective."""

    def __init__(self) -> None:
        self._group: Any = dist.new_group(backend="gloo", timeout=_WRITE_TIMEOUT)
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: futures.Future[dict[str, int]] | None = None

    def begin(self, folder: Path, policy: Trained) -> dict[str, Any]:
        """Copy the policy's state and start writing it to the existing ``folder``; returns what :func:`read` needs."""
        state: dict[str, Any] = dict(local_pieces(policy.chunks, policy.step.optimizer, to_save=True))
        for pieces in state.values():
            pieces.boxes = {offset: box.to("cpu", copy=True) for offset, box in pieces.boxes.items()}
        state[_rng_key(dist.get_rank(), dist.get_world_size())] = [_rng_state()]
        self._writing = self._thread.submit(_write, folder, state, self._group)
        return {
            "adam_step": adam_step(policy.step.optimizer),
            "schedule_step": int(policy.step.schedule.num_steps),
            "layout": _layout(),
        }

    def finished(self, *, wait: bool) -> dict[str, int] | None:
        """Get the sizes of all ranks' files in bytes by name; None while one is being written.

        Raises:
            CheckpointError: a rank could not write; every rank raises it with the reason.
        """
        writing = self._writing
        assert writing is not None
        # Short collectives in a row: ranks may write for longer than one collective may take.
        while not from_rank_zero(lambda: bool(futures.wait([writing], _POLL_S if wait else 0).done)):
            if not wait:
                return None
        if (error := writing.exception()) is not None:  # other ranks wait here until rank 0 has told them
            raise CheckpointError(_root_cause(error)) from error
        return writing.result()


@torch.no_grad()
def read(folder: Path, policy: Trained, extra: Mapping[str, Any]) -> None:
    """Load what :class:`BackgroundWriter` wrote, in this run's layout. A collective.

    Random states are restored in the layout that they were saved in. In another one every rank is seeded, as at a run's
    start, with a seed derived from rank 0's saved states: the run's own seed would repeat numbers that were used.

    Args:
        extra: what :meth:`BackgroundWriter.begin` returned.

    Raises:
        CheckpointError: the folder does not hold this model's state, or all of it.
    """
    saved, now = extra["layout"], _layout()
    rng = _rng_key(dist.get_rank() if saved == now else 0, saved["world_size"])
    state: dict[str, Any] = {**local_pieces(policy.chunks, policy.step.optimizer, to_save=False), rng: None}
    if (reason := _read(folder, state)) is not None:
        raise CheckpointError(f"checkpoint {folder} does not hold this model's state: {reason}")
    set_adam_step(policy.step.optimizer, extra["adam_step"])
    # Learning rate and weight decay follow this run's schedule, whose length may have changed.
    policy.step.schedule.num_steps = 0
    policy.step.schedule.step(extra["schedule_step"])
    (rng_state,) = state[rng]
    if saved == now:
        _set_rng_state(rng_state)
        return
    seed = _derived_seed(rng_state)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    if dist.get_rank() == 0:
        changed = ", ".join(f"{name} {saved[name]} then, {now[name]} now" for name in now if saved[name] != now[name])
        print(
            f"checkpoint {folder} was saved in another layout ({changed}): random states are not restored, they start "
            f"from seed {seed}, derived from the saved ones",
            flush=True,
        )


def save_weights(chunks: Sequence[torch.nn.Module], folder: str | Path) -> None:
    """Write a live model's weights to the existing, empty ``folder``, or raise CheckpointError. A collective."""
    try:
        _write(Path(folder), dict(local_pieces(chunks, to_save=True)), None)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{folder} could not be written ({_root_cause(error)}); free space") from error


@torch.no_grad()
def load_weights(chunks: Sequence[torch.nn.Module], folder: str | Path) -> None:
    """Fill this rank's parameters from a checkpoint of any layout, or raise ModelError. A collective."""
    if (reason := _read(Path(folder), dict(local_pieces(chunks, to_save=False)))) is not None:
        raise ModelError(f"checkpoint {folder} does not hold this model's weights: {reason}")


class _SavePlanner(dcp.DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.boxes[index.offset or torch.Size()] if isinstance(value, Pieces) else value


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        box: torch.Tensor = self.state_dict[index.fqn].boxes[index.offset]
        return box

    def load_bytes(self, read_item: Any, value: Any) -> None:  # torch's would run what a foreign folder names
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class _Writer(dcp.FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):  # torch.save fails again on closing its archive
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None  # what comes behind it does not reach the other ranks


def _write(folder: Path, state: dict[str, Any], group: dist.ProcessGroup | None) -> dict[str, int]:
    """Write this rank's file; returns sizes of all ranks' files in bytes by name."""
    if dist.get_rank() == 0:
        state = state | {_COMMON: [{}]}
        save_config(CheckpointingConfig("torch_dist"), str(folder))
    metadata: Metadata = dcp.save(
        state,
        storage_writer=_Writer(folder, per_thread_copy_ahead=0),
        planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        process_group=group,
    )
    sizes: dict[str, int] = {}
    for stored in metadata.storage_data.values():
        sizes[stored.relative_path] = max(sizes.get(stored.relative_path, 0), stored.offset + stored.length)
    return sizes


def _read(folder: Path, state: dict[str, Any]) -> str | None:
    """Fill ``state`` in place; returns why some rank failed, the same on each."""
    reason = None
    try:
        dcp.load(
            state, storage_reader=CheckedReader(folder), planner=_LoadPlanner(flatten_state_dict=False), no_dist=True
        )
    except (Exception, CheckpointException) as error:
        reason = _root_cause(error)
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next(filter(None, reasons), None)


def _layout() -> dict[str, int]:
    """What decides which random states a rank has."""
    return {
        "world_size": dist.get_world_size(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "etp": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def _rng_key(rank: int, world_size: int) -> str:
    return f"rng_state/shard_{rank}_{world_size}"


def _derived_seed(state: dict[str, Any]) -> int:
    """Below 2^31, from everything in one rank's random states."""
    plain = tree_map(lambda value: value.tolist() if torch.is_tensor(value) else value, state)
    return int.from_bytes(hashlib.sha256(repr(plain).encode()).digest()[:4], "big") >> 1


def _rng_state() -> dict[str, Any]:
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "model_parallel": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["model_parallel"])
    if state.get("cuda") is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _root_cause(error: BaseException) -> str:
    """The innermost reason in one line; torch's CheckpointException keeps one error a rank."""
    if failures := getattr(error, "failures", None):
        rank, (inner, _trace) = min(failures.items())
        return f"rank {rank}: {_root_cause(inner)}"
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
