"""The rollout service's part of a training checkpoint: the prompts' cursor, the gate's counts, what waits in the queue.

Over a kill and a restart each prompt is used exactly once: what is finished waits in the file, what was under way runs
again from its prompt, and the cursor stands behind both.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fr.errors import CheckpointError, TrajectoryError
from megatron_fr.rollout.runner import Group, Member
from megatron_fr.rollout.training import TrainingRollouts
from megatron_fr.trajectory import Trajectory, decode, encode


@dataclass(frozen=True)
class Counters:
    """Everything that is a number; see the gate, the queue, the pool and the cursor for their meaning."""

    version: int
    cursor: int
    consumed_batches: int
    started: int
    failed: int
    dropped: int
    groups: int
    next_batch: int
    finished: int
    refused: int


@dataclass(frozen=True)
class RolloutState:
    """One instant of the service.

    Attributes:
        unfinished: rollouts to run again: ``group_id, prompt_id, index, attempt``.
        prompts: digest of the prompts' ids in order, their number, and how they are shuffled.
        ready: complete units, in the order in which they will be leased.
        partial: members of groups that wait for their others.
    """

    counters: Counters
    unfinished: Sequence[Mapping[str, Any]]
    prompts: Mapping[str, Any]
    ready: Sequence[Trajectory]
    partial: Sequence[Trajectory]


def take_state(rollouts: TrainingRollouts, version: int) -> RolloutState:
    """The state now; call it in the event loop's thread. Payloads are shared, not copied."""
    unfinished, doomed, groups = rollouts.pool.snapshot()
    ready, partial, next_batch = rollouts.queue.snapshot()
    return RolloutState(
        counters=Counters(
            version=version,
            cursor=rollouts.cursor.position,
            consumed_batches=rollouts.gate.consumed_batches,
            started=rollouts.gate.started,
            failed=rollouts.gate.failed,
            dropped=rollouts.gate.dropped + doomed,
            groups=groups,
            next_batch=next_batch,
            finished=rollouts.pool.finished,
            refused=rollouts.pool.refused,
        ),
        unfinished=[
            {"group_id": u.group.id, "prompt_id": u.group.prompt.id, "index": u.index, "attempt": u.attempt}
            for u in unfinished
        ],
        prompts=rollouts.cursor.order,
        ready=ready,
        partial=partial,
    )


def restore_state(rollouts: TrainingRollouts, state: RolloutState) -> None:
    """Go on from ``state``; nothing runs yet.

    Raises:
        CheckpointError: the prompts are others than they were, or a trajectory does not fit the model.
    """
    changed = [
        f"{name}: {state.prompts.get(name)!r} then, {value!r} now"
        for name, value in rollouts.cursor.order.items()
        if state.prompts.get(name) != value
    ]
    if changed:
        raise CheckpointError(
            f"the checkpoint was made with other prompts ({'; '.join(changed)}); restore data.train, seed and "
            "data.shuffle, or start anew with checkpoint.resume=never"
        )
    counters = state.counters
    by_id = {prompt.id: prompt for prompt in rollouts.prompts}
    rollouts.cursor.seek(counters.cursor)
    for name in ("consumed_batches", "started", "failed", "dropped"):
        setattr(rollouts.gate, name, getattr(counters, name))
    try:
        rollouts.queue.restore(state.ready, state.partial, counters.next_batch)
    except TrajectoryError as error:
        raise CheckpointError(f"the checkpoint's trajectories do not fit this run: {error}") from error
    groups = {u["group_id"]: Group(u["group_id"], by_id[u["prompt_id"]]) for u in state.unfinished}
    unfinished = [Member(groups[u["group_id"]], u["index"], u["attempt"]) for u in state.unfinished]
    rollouts.pool.restore(unfinished, counters.groups)
    rollouts.pool.finished, rollouts.pool.refused = counters.finished, counters.refused


def encode_state(state: RolloutState) -> bytes:
    """Pack a state into one npz archive without pickles."""
    head = {
        "counters": asdict(state.counters),
        "unfinished": [dict(u) for u in state.unfinished],
        "prompts": dict(state.prompts),
        "num_ready": len(state.ready),
    }
    buffer = io.BytesIO()
    payload = encode([*state.ready, *state.partial])
    np.savez(
        buffer,
        allow_pickle=False,
        head=np.frombuffer(json.dumps(head).encode(), dtype=np.uint8),
        trajectories=np.frombuffer(payload, dtype=np.uint8),
    )
    return buffer.getvalue()


def decode_state(payload: bytes) -> RolloutState:
    """Undo :func:`encode_state`.

    Raises:
        CheckpointError: the bytes are not such an archive.
    """
    try:
        with np.load(io.BytesIO(payload), allow_pickle=False) as archive:
            head = json.loads(archive["head"].tobytes())
            trajectories = decode(archive["trajectories"].tobytes())
        count = int(head["num_ready"])
        counters, ready, partial = Counters(**head["counters"]), trajectories[:count], trajectories[count:]
        return RolloutState(counters, head["unfinished"], head["prompts"], ready, partial)
    except Exception as error:  # on damaged bytes numpy, zipfile and json raise a dozen kinds
        raise CheckpointError(f"{len(payload)} bytes are no rollout state: {error}") from error


def read_state(path: Path) -> RolloutState:
    """The state in a file.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        return decode_state(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"rollout state {path}: {error.strerror}") from error
    except CheckpointError as error:
        raise CheckpointError(f"rollout state {path} is damaged: {error}") from error
