"""Writing and reading one checkpoint folder with Megatron's ``dist_checkpointing`` (torch_dist), in the background.

The writing is Megatron's own asynchronous save: each rank forks a child that writes that rank's file from a snapshot
of its memory (copy-on-write), while training goes on. Three changes: results come back through anonymous memory instead
of a manager process, which would outlive a killed trainer; the child dies with its rank; and it brings what it wrote to
the disk and takes the checksums for the manifest.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import pickle
import queue
import random
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from megatron_fr.checkpoint.manifest import Entry, describe
from megatron_fr.checkpoint.state import (
    OptimizerTarget,
    adam_step,
    model_state,
    optimizer_state,
    set_adam_step,
)
from megatron_fr.errors import CheckpointError
from megatron_fr.trainer.policy import Policy

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5
# Warnings of a format change and of an asynchronous writer that this package does not need.
logging.getLogger("megatron.core.dist_checkpointing.strategies.torch").setLevel(logging.ERROR)


class BackgroundWriter:
    """One checkpoint at a time on its way to disk. Every method is a collective."""

    def __init__(self) -> None:
        self._calls = AsyncCallsQueue()
        self._results = _ResultPipe()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint was begun and not finished."""
        return bool(self._calls.get_num_unfinalized_calls())

    def begin(self, folder: Path, policy: Policy, others: Sequence[Path] = ()) -> dict[str, Any]:
        """Snapshot the policy and start writing it to the existing ``folder``, which holds nothing of it.

        Args:
            others: further files of ``folder``, complete already, whose checksums this rank's child takes.

        Returns:
            what belongs to this state and is no tensor, for :func:`read` to get back.
        """
        model = model_state(policy.chunks)
        state = {
            "model": model,
            "optimizer": optimizer_state(policy.step.optimizer, model),
            "rng": ShardedObject("rng_state", _rng_state(), (dist.get_world_size(),), (dist.get_rank(),), replica_id=0),
        }
        # Megatron keeps the results' queue in a module variable and would start a manager process for it.
        filesystem_async._results_queue = self._results = _ResultPipe()
        request = dist_checkpointing.save(state, str(folder), async_sharded_save=True, async_strategy="mcore")
        if request.async_fn is not None:
            request = request._replace(
                async_fn=partial(_in_child, os.getpid(), self._results, folder, others, request.async_fn)
            )
        self._calls.schedule_async_request(request)
        return {
            "adam_step": adam_step(policy.step.optimizer),
            "schedule_step": int(policy.step.schedule.num_steps),
            "layout": _layout(),
        }

    def finished(self, *, wait: bool) -> bool:
        """Whether the checkpoint that was begun is on the disk on every rank.

        Waiting is a series of short collectives: ranks may need longer than a collective may take.

        Raises:
            CheckpointError: a rank could not write; every rank raises it, rank 0 with the reason.
        """
        try:
            pause_s = 0.01
            while not (done := bool(self._calls.maybe_finalize_async_calls(blocking=False))) and wait and self.busy:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_S)
            return done
        except Exception as error:  # CheckpointException (a BaseException of torch's) is handled below
            raise CheckpointError(_root_cause(error)) from error
        except BaseException as error:
            if type(error).__name__ != "CheckpointException":
                raise
            raise CheckpointError(_root_cause(error)) from error

    def entries(self) -> dict[str, Entry]:
        """The manifest's entries of all files that the ranks' children wrote or were given, once it is finished."""
        found: list[dict[str, Entry]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, self._results.entries)
        return {name: entry for part in found for name, entry in part.items()}

    def abandon(self) -> None:
        """Kill the writing, whatever its state. No collective."""
        while self._calls.async_calls:
            self._calls.async_calls.popleft().async_caller.close(abort=True)


@torch.no_grad()
def read(folder: Path, policy: Policy, extra: dict[str, Any]) -> None:
    """Load what :class:`BackgroundWriter` wrote, in this run's layout. A collective.

    Random states are restored in the layout that they were saved in. In another one there is no rank that they belong
    to: every rank is seeded, as at a run's start, with a seed derived from rank 0's saved states, and rank 0 says so.
    Starting again from the run's own seed would repeat numbers that were used.

    Args:
        extra: what :meth:`BackgroundWriter.begin` returned.

    Raises:
        CheckpointError: the folder does not hold this model's state, or all of it.
    """
    if missing := sorted({"adam_step", "schedule_step", "layout"} - extra.keys()):
        raise CheckpointError(
            f"checkpoint {folder} is of an earlier version of this software: its record has no {missing[0]!r}; "
            "convert it with tools/convert_megatron_to_hf.py and start from that model with checkpoint.resume=never"
        )
    model = model_state(policy.chunks)
    target = OptimizerTarget(policy.step.optimizer, model)
    state: dict[str, Any] = {"model": model, "optimizer": target.state}
    saved, now = extra["layout"], _layout()
    shard = dist.get_rank() if saved == now else 0
    state["rng"] = ShardedObject("rng_state", None, (saved["world_size"],), (shard,), replica_id=0)
    try:
        # A rank asks for the optimizer state of the parameters it updates, so not every tensor is asked for by the
        # rank that is its main replica, which the check of integrity would demand.
        loaded = dist_checkpointing.load(state, str(folder), validate_access_integrity=False)
    except Exception as error:
        raise CheckpointError(f"checkpoint {folder} does not hold this model's state: {_root_cause(error)}") from error
    for i, chunk in enumerate(policy.chunks):
        chunk.load_state_dict(loaded["model"][f"chunk{i}"], strict=True)
    target.take(loaded["optimizer"])
    set_adam_step(policy.step.optimizer, extra["adam_step"])
    # Sets learning rate and weight decay of this step of this run's schedule, whose length may have changed.
    policy.step.schedule.num_steps = 0
    policy.step.schedule.step(extra["schedule_step"])
    if saved == now:
        _set_rng_state(loaded["rng"])
        return
    seed = _derived_seed(loaded["rng"])
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


class _ResultPipe:
    """A queue of one item from a forked child, in memory: it needs no disk, no process and no reader at the time.

    Attributes:
        entries: of the manifest; the child fills them, the parent has them once it has got the item.
    """

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create("checkpoint-results"), "r+b")
        self._item: Any = None
        self.entries: dict[str, Entry] = {}

    def put(self, item: Any) -> None:
        """Called in the child, by Megatron."""
        self._item = item

    def send(self) -> None:
        """Called in the child, last."""
        pickle.dump((self._item, self.entries), self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        """Called by the parent once the child has ended; closes the queue."""
        with self._file as file:
            file.seek(0)
            try:
                item, self.entries = pickle.load(file)
            except EOFError:
                raise queue.Empty from None
        return item


def _in_child(
    parent: int,
    results: _ResultPipe,
    folder: Path,
    others: Sequence[Path],
    write: Callable[..., None],
    *args: Any,
    **kwargs: Any,
) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # a stop request is for the trainer, which waits for this child
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)

    def take_entry(path: Path) -> None:
        results.entries[str(path.relative_to(folder))] = describe(path, sync=True)

    writer: Any = filesystem_async.FileSystemWriterAsync
    write_file = writer.write_preloaded_data

    def write_or_raise(*given: Any, **named: Any) -> Any:
        """Megatron turns the error that this returns into one about its type; raised, it keeps its words."""
        result = write_file(*given, **named)
        if result is not None and isinstance(result[1], Exception):
            error: BaseException | None = result[1]
            while error is not None and not isinstance(error, OSError):  # torch.save fails again on closing its archive
                error = error.__cause__ or error.__context__
            raise error or result[1]
        take_entry(Path(named["write_bucket"][0]))
        return result

    writer.write_preloaded_data = staticmethod(write_or_raise)  # in this child only
    write(*args, **kwargs)
    try:
        for path in others:
            take_entry(path)
    except OSError as error:
        results.put(error)
    results.send()


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


def _derived_seed(state: dict[str, Any]) -> int:
    """Below 2^31, from everything in one rank's random states."""
    digest = hashlib.sha256(repr(state["python"]).encode())
    tensors = [state["torch"], state["numpy"][1], *(s for _, s in sorted(state["model_parallel"].items()))]
    for tensor in [*tensors, *([state["cuda"]] if "cuda" in state else [])]:
        digest.update(tensor.cpu().numpy().tobytes())
    return int.from_bytes(digest.digest()[:4], "big") >> 1


def _rng_state() -> dict[str, Any]:
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "model_parallel": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["model_parallel"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _root_cause(error: BaseException) -> str:
    """The innermost reason in one line; torch's CheckpointException keeps one error a rank."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (inner, _trace) = sorted(failures.items())[0]
        return f"rank {rank}: {_root_cause(inner)}"
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().splitlines()
    if not text and failures is not None:
        return "another rank could not write; see its log"
    return f"{type(error).__name__}: {text[0] if text else ''}"
