"""The rollout service's part of a training checkpoint: the prompts' cursor, the gate's counts, what waits in the queue.

Over a kill and a restart each prompt is used exactly once: what is finished waits in the file, what was under way runs
again from its prompt, and the cursor stands behind both.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fr.errors import CheckpointError, TrajectoryError
from megatron_fr.rollout.cursor import PromptCursor
from megatron_fr.rollout.runner import Group, Member, TrainingRollouts
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
    """One instant of the service."""

    counters: Counters
    unfinished: Sequence[dict[str, Any]]  # rollouts to run again: group_id, prompt_id, index, attempt
    prompts: dict[str, Any]  # the cursor's order
    ready: Sequence[Trajectory]  # complete units, in the order in which they will be leased
    partial: Sequence[Trajectory]  # members of groups that wait for their others
    failed: dict[str, str] = field(default_factory=dict)  # prompts set aside, with their reasons


def take_state(rollouts: TrainingRollouts, version: int) -> RolloutState:
    """The state now; call it in the event loop's thread. Payloads are shared, not copied."""
    unfinished, doomed, groups = rollouts.pool.snapshot()
    ready, partial, next_batch = rollouts.queue.snapshot()
    counters = Counters(
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
    )
    again = [
        {"group_id": m.group.id, "prompt_id": m.group.prompt.id, "index": m.index, "attempt": m.attempt}
        for m in unfinished
    ]
    return RolloutState(counters, again, rollouts.cursor.order, ready, partial, dict(rollouts.failed.reasons))


def check_same_prompts(state: RolloutState, cursor: PromptCursor) -> None:
    """Raise CheckpointError unless ``cursor`` gives the prompts of ``state`` in their order."""
    then, now = state.prompts, cursor.order
    differing = (name for name in now if then.get(name, now[name]) != now[name])  # older versions saved less
    if changed := [f"{name}: {then.get(name)!r} then, {now[name]!r} now" for name in differing]:
        raise CheckpointError(
            f"the checkpoint was made with other prompts ({'; '.join(changed)}); restore data.train, seed and "
            "data.shuffle, or start anew with checkpoint.resume=never"
        )


def restore_state(rollouts: TrainingRollouts, state: RolloutState) -> None:
    """Go on from ``state``; nothing runs yet. Other prompts or another model than then are a CheckpointError."""
    check_same_prompts(state, rollouts.cursor)
    counters = state.counters
    rollouts.cursor.seek(counters.cursor)
    rollouts.failed.restore(state.failed)
    for name in ("consumed_batches", "started", "failed", "dropped"):
        setattr(rollouts.gate, name, getattr(counters, name))
    try:
        rollouts.queue.restore(state.ready, state.partial, counters.next_batch)
    except TrajectoryError as error:
        raise CheckpointError(f"the checkpoint's trajectories do not fit this run: {error}") from error
    by_id = {prompt.id: prompt for prompt in rollouts.prompts}
    groups = {u["group_id"]: Group(u["group_id"], by_id[u["prompt_id"]]) for u in state.unfinished}
    unfinished = [Member(groups[u["group_id"]], u["index"], u["attempt"]) for u in state.unfinished]
    rollouts.pool.restore(unfinished, counters.groups)
    rollouts.pool.finished, rollouts.pool.refused = counters.finished, counters.refused


def encode_state(state: RolloutState) -> bytes:
    """Pack a state into one npz archive without pickles."""
    head: dict[str, Any] = {"counters": asdict(state.counters), "num_ready": len(state.ready)}
    head |= {"unfinished": state.unfinished, "prompts": state.prompts, "failed": state.failed}
    parts = {"head": json.dumps(head).encode(), "trajectories": encode([*state.ready, *state.partial])}
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **{name: np.frombuffer(part, np.uint8) for name, part in parts.items()})
    return buffer.getvalue()


def decode_state(payload: bytes) -> RolloutState:
    """Undo :func:`encode_state`; CheckpointError where the bytes are no such archive."""
    try:
        with np.load(io.BytesIO(payload), allow_pickle=False) as archive:
            head = json.loads(archive["head"].tobytes())
            trajectories = decode(archive["trajectories"].tobytes())
        count = int(head["num_ready"])
        counters, ready, partial = Counters(**head["counters"]), trajectories[:count], trajectories[count:]
        return RolloutState(counters, head["unfinished"], head["prompts"], ready, partial, head.get("failed", {}))
    except Exception as error:  # on damaged bytes numpy, zipfile and json raise a dozen kinds
        raise CheckpointError(f"{len(payload)} bytes are no rollout state: {error}") from error


def read_state(path: Path) -> RolloutState:
    """The state in a file; CheckpointError where it is missing or damaged."""
    try:
        return decode_state(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"rollout state {path}: {error.strerror}") from error
    except CheckpointError as error:
        raise CheckpointError(f"rollout state {path} is damaged: {error}") from error
