"""Training checkpoints of one run: when one is complete, how long it is kept, and going on from it.

A checkpoint is written beside the training: :meth:`TrainingCheckpoints.begin` takes the snapshot, and
:meth:`TrainingCheckpoints.poll`, called between updates, gives the folder its final name once every rank has written
and taken the checksums of what it wrote.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from megatron_fr.checkpoint import io as checkpoint_io
from megatron_fr.checkpoint import store as checkpoints
from megatron_fr.checkpoint.manifest import Entry, check_sizes
from megatron_fr.checkpoint.retention import retain, set_newer_aside
from megatron_fr.checkpoint.store import RunRecord
from megatron_fr.config import RunConfig
from megatron_fr.errors import CheckpointError, ModelError
from megatron_fr.hf.folder import copy_other_files
from megatron_fr.hf.to_megatron import HF_FILES
from megatron_fr.models.dims import Dims
from megatron_fr.models.registry import is_tied
from megatron_fr.runtime.collectives import from_rank_zero
from megatron_fr.trainer.policy import Policy


class TrainingCheckpoints:
    """One per rank; every method is a collective.

    Args:
        rollout_state: asked on rank 0 for the rollout service's part, between a commit and the next lease.
    """

    def __init__(self, config: RunConfig, policy: Policy, rollout_state: Callable[[], bytes]) -> None:
        self._config = config
        self._policy = policy
        self._rollout_state = rollout_state
        self._writer = checkpoint_io.BackgroundWriter()
        self._fixed = _fixed(config, policy)
        self._work: Path | None = None
        self._lock: IO[str] | None = None  # on rank 0, while it is written
        self._record: RunRecord | None = None
        self._saved_update = -1
        from_rank_zero(lambda: checkpoints.remove_unfinished(config.output, lambda line: print(line, flush=True)))

    def load(self, folder: Path) -> RunRecord:
        """Bring model, optimizer, schedule and random states to where ``folder`` was saved, in whatever layout.

        Its checksums are not looked at: that is done when it is chosen, see ``checkpoint/check.py``.
        Raises:
            CheckpointError: it is damaged, or of a run with another model or batch size.
        """
        record = from_rank_zero(lambda: self._usable(folder))
        checkpoint_io.read(folder, self._policy, dict(record.trainer))
        self._saved_update = record.update
        return record

    def set_newer_aside(self) -> None:
        """Rename checkpoints of later updates than the loaded one: they are of another continuation than this run's.

        Raises:
            CheckpointError: one cannot be renamed.
        """
        from_rank_zero(lambda: self._set_newer_aside(self._saved_update))

    def begin(self, *, update: int, version: int, score: float | None) -> None:
        """Snapshot and start writing; waits for the one before. Does nothing where this update is saved already.

        Raises:
            CheckpointError: the folder cannot be written, or the one before could not. Earlier ones stay as they are.
        """
        self.finish()
        if update == self._saved_update:
            return
        self._work = work = from_rank_zero(lambda: self._prepare(update))
        others = [work / checkpoints.ROLLOUT_FILE] if dist.get_rank() == 0 else []
        trainer = self._writer.begin(work, self._policy, others)
        self._record = RunRecord(update, version, score, self._fixed, trainer)
        self._saved_update = update

    def poll(self) -> None:
        """Complete the checkpoint that is being written, if all ranks are through with it.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._work is not None:
            self._complete(wait=False)

    def finish(self) -> Path | None:
        """Wait for the checkpoint that is being written; the newest complete folder of this process, if any.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._work is not None:
            self._complete(wait=True)
        return checkpoints.folder_of(self._config.output, self._saved_update) if self._saved_update >= 0 else None

    def _complete(self, *, wait: bool) -> None:
        work = self._work
        assert work is not None
        try:
            if not self._writer.finished(wait=wait):
                return
        except CheckpointError as error:
            self._work = None
            if dist.get_rank() == 0:
                self._discard(work)
            raise _unwritable(work, str(error)) from error
        self._work = None
        known = self._writer.entries()
        from_rank_zero(lambda: self._name(work, known))

    def _prepare(self, update: int) -> Path:
        work = checkpoints.folder_of(self._config.output, update)
        try:
            work, self._lock = checkpoints.work_folder(self._config.output, update)
        except OSError as error:
            raise _unwritable(work, str(error.strerror)) from error
        try:
            (work / checkpoints.ROLLOUT_FILE).write_bytes(self._rollout_state())
            # With these the conversion to a Hugging Face folder needs nothing else.
            (work / HF_FILES).mkdir()
            copy_other_files(self._policy.source, work / HF_FILES)
        except (OSError, ModelError) as error:
            self._discard(work)
            raise _unwritable(work, getattr(error, "strerror", None) or str(error)) from error
        return work

    def _name(self, work: Path, known: Mapping[str, Entry]) -> None:
        assert self._record is not None
        keep = self._config.checkpoint
        try:
            self._record.write(work)
            final = checkpoints.complete(work, known)
        except OSError as error:
            self._discard(work)
            raise _unwritable(work, str(error.strerror)) from error
        self._release()
        for problem in retain(self._config.output, final, last=keep.keep_last, best=keep.keep_best):
            print(f"checkpoint {final} is complete; older one {problem}", flush=True)

    def _discard(self, work: Path) -> None:
        self._release()  # first: on NFS a folder with an open file cannot be deleted
        shutil.rmtree(work, ignore_errors=True)

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _usable(self, folder: Path) -> RunRecord:
        try:
            check_sizes(folder)
        except CheckpointError as error:
            raise type(error)(f"checkpoint {folder}: {error}; go on from another one") from error
        record = checkpoints.read_record(folder)
        checkpoints.check_fixed(folder, record.fixed, self._fixed)
        return record

    def _set_newer_aside(self, update: int) -> None:
        for folder in set_newer_aside(self._config.output, update):
            print(f"going on from update {update}: the later checkpoint there was is now {folder}", flush=True)


def _fixed(config: RunConfig, policy: Policy) -> dict[str, Any]:
    """What must not change: the tensors' shapes and meaning, what the tokens are, and what the counters count."""
    hf = policy.hf_config
    dims = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(Dims.from_hf(hf)).items()}
    rope = dict(getattr(hf, "rope_parameters", None) or {})
    tokenizer = policy.source / "tokenizer.json"
    return {
        "model": {
            "architecture": hf.architectures[0],
            **dims,
            "rope_theta": rope.pop("rope_theta", None),
            "rope_parameters": rope,
            "rms_norm_eps": hf.rms_norm_eps,
            "tie_word_embeddings": is_tied(hf),
            "norm_topk_prob": getattr(hf, "norm_topk_prob", None),
            "tokenizer.json": hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else None,
        },
        "model.dtype": config.model.dtype,
        "algorithm.name": config.algorithm.name,
        "algorithm.group_size": config.algorithm.group_size,
        "train.batch_size": config.train.batch_size,
        # Trajectories that wait were sampled at it.
        "rollout.temperature": config.rollout.temperature,
    }


def _unwritable(work: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {work.with_suffix('')} could not be written ({reason}); free space or set output to another "
        "folder. Earlier checkpoints are untouched: the same command goes on from the newest one"
    )
