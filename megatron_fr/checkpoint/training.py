"""Training checkpoints of one run: :class:`TrainingCheckpoints` writes them, keeps some, and goes on from one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_fr.checkpoint import io, store
from megatron_fr.checkpoint.fixed import check_unchanged, model_settings, run_settings
from megatron_fr.checkpoint.state import Trained
from megatron_fr.checkpoint.store import RunRecord
from megatron_fr.config import RunConfig
from megatron_fr.errors import CheckpointError, ModelError
from megatron_fr.hf.folder import copy_other_files
from megatron_fr.runtime.collectives import from_rank_zero
from megatron_fr.runtime.output_lock import lock_output


class TrainingCheckpoints:
    """One per rank; every method is a collective.

    Args:
        rollout_state: gives the rollout service's state; called on rank 0, between a commit and the next lease.

    Raises:
        MegatronFRError: another run writes to ``output``, or it cannot be written.
    """

    def __init__(self, config: RunConfig, policy: Trained, rollout_state: Callable[[], bytes]) -> None:
        self._config = config
        self._policy = policy
        self._rollout_state = rollout_state
        self._writer = io.BackgroundWriter()
        self._fixed = run_settings(config) | model_settings(policy.spec.identity(), policy.source)
        self._pending: tuple[Path, RunRecord] | None = None
        self._newest: Path | None = None
        self._saved_update = -1
        self._lock: Any = None  # on rank 0
        from_rank_zero(self._own_output)

    def load(self, folder: Path) -> RunRecord:
        """Load model, optimizer, schedule and random states, saved in any layout, from ``folder``.

        Raises:
            CheckpointError: a tensor is damaged, or the folder is of a run with another model or batch size.
        """
        record = from_rank_zero(lambda: check_unchanged(folder, self._fixed))
        io.read(folder, self._policy, record.trainer)
        self._newest, self._saved_update = folder, record.update
        return record

    def set_newer_aside(self) -> None:
        """Rename checkpoints of later updates than the loaded one, or raise CheckpointError."""
        update = self._saved_update
        for folder in from_rank_zero(lambda: store.set_newer_aside(self._config.output, update)):
            if dist.get_rank() == 0:
                print(f"going on from update {update}: what there was of a later one is now {folder}", flush=True)

    def begin(self, *, update: int, version: int, score: float | None) -> None:
        """Copy the state and start writing, after the checkpoint before; does nothing where this update is saved.

        Raises:
            CheckpointError: this checkpoint or the one before could not be written. Earlier ones stay as they are.
        """
        self.finish()
        if update == self._saved_update:
            return
        work = from_rank_zero(lambda: self._prepare(update))
        self._pending = work, RunRecord(update, version, score, self._fixed, self._writer.begin(work, self._policy))

    def finish(self, *, wait: bool = True) -> Path | None:
        """Complete the pending checkpoint, without ``wait`` only if all ranks have written it; returns the newest.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._pending is not None:
            work, record = self._pending
            try:
                sizes = self._writer.finished(wait=wait)
            except CheckpointError as error:
                self._pending = None
                raise _discard(work, error) from error
            if sizes is not None:
                self._pending = None
                self._newest = from_rank_zero(lambda: self._name(work, record, sizes))
                self._saved_update = record.update
        return self._newest

    def close(self) -> None:
        """Release the lock on ``output``."""
        if self._lock is not None:
            self._lock.close()

    def _own_output(self) -> None:
        self._lock = lock_output(self._config.output, store.FOLDER)
        if self._lock is not None:  # else what is unfinished may be another run's
            store.remove_unfinished(self._config.output, lambda line: print(line, flush=True))

    def _prepare(self, update: int) -> Path:
        try:
            work = store.work_folder(self._config.output, update)
            (work / store.ROLLOUT_FILE).write_bytes(self._rollout_state())
            # With these the conversion to a Hugging Face folder needs nothing else.
            (work / store.HF_FILES).mkdir()
            copy_other_files(self._policy.source, work / store.HF_FILES)
        except (OSError, ModelError) as error:
            raise _discard(store.folder_of(self._config.output, update), error) from error
        return work

    def _name(self, work: Path, record: RunRecord, sizes: Mapping[str, int]) -> Path:
        keep = self._config.checkpoint
        try:
            final = store.complete(work, record, sizes)
        except OSError as error:
            raise _discard(work, error) from error
        for line in store.retain(self._config.output, final, last=keep.keep_last, best=keep.keep_best):
            print(f"checkpoint {final} is complete; older one {line}", flush=True)
        return final


def _discard(folder: Path, error: Exception) -> CheckpointError:
    """Delete the unfinished folder of a checkpoint; returns the error to raise."""
    shutil.rmtree(folder.with_suffix(".tmp"), ignore_errors=True)
    return store.unwritable(folder.with_suffix(""), error)
