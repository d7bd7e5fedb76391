"""Training checkpoints of one run: when one is complete, how long it is kept, and going on from it.

A checkpoint is written beside the training: :meth:`TrainingCheckpoints.begin` copies the state, and
:meth:`TrainingCheckpoints.poll`, called between updates, gives the folder its final name once every rank has written.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_fr.checkpoint import io, store
from megatron_fr.checkpoint.state import Trained
from megatron_fr.checkpoint.store import RunRecord
from megatron_fr.config import RunConfig
from megatron_fr.errors import CheckpointError, ModelError
from megatron_fr.hf.folder import copy_other_files
from megatron_fr.runtime.collectives import from_rank_zero


class TrainingCheckpoints:
    """One per rank; every method is a collective.

    Args:
        rollout_state: asked on rank 0 for the rollout service's part, between a commit and the next lease.

    Raises:
        CheckpointError: another run writes to ``output``, or it cannot be written.
    """

    def __init__(self, config: RunConfig, policy: Trained, rollout_state: Callable[[], bytes]) -> None:
        self._config = config
        self._policy = policy
        self._rollout_state = rollout_state
        self._writer = io.BackgroundWriter()
        self._fixed = _fixed(config, policy)
        self._work: Path | None = None
        self._record: RunRecord | None = None
        self._saved_update = -1
        self._lock: Any = None  # on rank 0, for the life of this object
        from_rank_zero(self._own_output)

    def load(self, folder: Path) -> RunRecord:
        """Bring model, optimizer, schedule and random states to where ``folder`` was saved, in whatever layout.

        Raises:
            CheckpointError: it is damaged, or of a run with another model or batch size.
        """
        record = from_rank_zero(lambda: self._usable(folder))
        io.read(folder, self._policy, record.trainer)
        self._saved_update = record.update
        return record

    def set_newer_aside(self) -> None:
        """Rename checkpoints of later updates than the loaded one: they are of another continuation than this run's.

        Raises:
            CheckpointError: one cannot be renamed.
        """
        update = self._saved_update
        for folder in from_rank_zero(lambda: store.set_newer_aside(self._config.output, update)):
            if dist.get_rank() == 0:
                print(f"going on from update {update}: the later checkpoint there was is now {folder}", flush=True)

    def begin(self, *, update: int, version: int, score: float | None) -> None:
        """Copy the state and start writing; waits for the one before. Does nothing where this update is saved already.

        Raises:
            CheckpointError: the folder cannot be written, or the one before could not. Earlier ones stay as they are.
        """
        self.finish()
        if update == self._saved_update:
            return
        self._work = work = from_rank_zero(lambda: self._prepare(update))
        self._record = RunRecord(update, version, score, self._fixed, self._writer.begin(work, self._policy))
        self._saved_update = update

    def poll(self) -> None:
        """Complete the checkpoint that is being written, if all ranks are through with it.

        Raises:
            CheckpointError: it could not be written.
        """
        self._complete(wait=False)

    def finish(self) -> Path | None:
        """Wait for the checkpoint that is being written; the newest complete folder of this process, if any.

        Raises:
            CheckpointError: it could not be written.
        """
        self._complete(wait=True)
        return store.folder_of(self._config.output, self._saved_update) if self._saved_update >= 0 else None

    def close(self) -> None:
        """Let another run write to ``output``."""
        if self._lock is not None:
            self._lock.close()

    def _complete(self, *, wait: bool) -> None:
        if (work := self._work) is None:
            return
        try:
            if (sizes := self._writer.finished(wait=wait)) is None:
                return
        except CheckpointError as error:
            self._work = None
            if dist.get_rank() == 0:
                shutil.rmtree(work, ignore_errors=True)
            raise store.unwritable(work.with_suffix(""), str(error)) from error
        self._work = None
        from_rank_zero(lambda: self._name(work, sizes))

    def _own_output(self) -> None:
        self._lock = store.lock_output(self._config.output)
        if self._lock is not None:  # else what is unfinished may be another run's
            store.remove_unfinished(self._config.output, lambda line: print(line, flush=True))

    def _prepare(self, update: int) -> Path:
        work = store.folder_of(self._config.output, update)
        try:
            work = store.work_folder(self._config.output, update)
            (work / store.ROLLOUT_FILE).write_bytes(self._rollout_state())
            # With these the conversion to a Hugging Face folder needs nothing else.
            (work / store.HF_FILES).mkdir()
            copy_other_files(self._policy.source, work / store.HF_FILES)
        except (OSError, ModelError) as error:
            shutil.rmtree(work.with_suffix(".tmp"), ignore_errors=True)
            raise store.unwritable(work.with_suffix(""), getattr(error, "strerror", None) or str(error)) from error
        return work

    def _name(self, work: Path, sizes: Mapping[str, int]) -> None:
        assert self._record is not None
        keep = self._config.checkpoint
        try:
            self._record.write(work)
            final = store.complete(work, sizes)
        except OSError as error:
            shutil.rmtree(work, ignore_errors=True)
            raise store.unwritable(work.with_suffix(""), str(error.strerror)) from error
        for problem in store.retain(self._config.output, final, last=keep.keep_last, best=keep.keep_best):
            print(f"checkpoint {final} is complete; older one {problem}", flush=True)

    def _usable(self, folder: Path) -> RunRecord:
        try:
            record = store.check_sizes(folder)
        except CheckpointError as error:
            raise type(error)(f"checkpoint {folder}: {error}; go on from another one") from error
        check_fixed(folder, record.fixed, self._fixed)
        return record


def check_fixed(folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with another model, batch size and the like; what an older version did not save is not compared.

    Raises:
        CheckpointError: names each field with both values.
    """
    changed = [
        f"{name}: {saved[name]!r} then, {value!r} now"
        for name, value in now.items()
        if name in saved and saved[name] != value
    ]
    if changed:
        raise CheckpointError(
            f"checkpoint {folder} is of another run ({'; '.join(changed)}); undo the change, choose another output "
            "folder, or start anew with checkpoint.resume=never"
        )


def _fixed(config: RunConfig, policy: Trained) -> dict[str, Any]:
    """What must not change: the tensors' shapes and meaning, what the tokens are, and what the counters count."""
    tokenizer = policy.source / "tokenizer.json"
    return {
        **{f"model.{name}": value for name, value in policy.spec.identity().items()},
        "model.tokenizer.json": hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else None,
        "model.dtype": config.model.dtype,
        "algorithm.name": config.algorithm.name,
        "algorithm.group_size": config.algorithm.group_size,
        "train.batch_size": config.train.batch_size,
        # Trajectories that wait were sampled at it.
        "rollout.temperature": config.rollout.temperature,
    }
