"""Token sequences to calibrate a quantisation on: recorded trajectories, or JSONL.

Training checkpoints hold the finished trajectories that wait for their update (``rollout.state``): the policy's own
text, with prompts and tool output in between. Any number may wait in one checkpoint, also none, so a run's folder gives
those of all its checkpoints.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from megatron_fr.checkpoint.store import FOLDER, ROLLOUT_FILE, all_checkpoints
from megatron_fr.errors import CheckpointError, ModelError, TrajectoryError
from megatron_fr.hf.folder import read_spec
from megatron_fr.rollout.state import read_state
from megatron_fr.trajectory import Trajectory, decode

#: A place to name in errors, and token ids.
Row = tuple[str, list[int]]


def read_calibration(
    path: str | Path, folder: str | Path, *, limit: int = 64, max_tokens: int = 4096
) -> list[torch.Tensor]:
    """Token ids of recorded trajectories, or of JSONL with ``tokens`` or ``prompt`` in each line.

    Args:
        path: a run's output folder or the ``training_state`` in it (its checkpoints, newest first; one that cannot be
            read is skipped with a message), one training checkpoint (its folder or its ``rollout.state``), an archive
            of trajectories (npz), or JSONL.
        folder: of the model, for its tokenizer.

    Returns:
        int64 tensors ``[1, tokens]``, at most ``limit``.

    Raises:
        ModelError: it is nothing of these, or holds no trajectory; a trajectory or line, which is named, has a token
            that the model's vocabulary lacks; or a line is no such object.
    """
    path = Path(path)
    vocabulary = read_spec(folder).vocab
    if (path / ROLLOUT_FILE).exists():
        path = path / ROLLOUT_FILE
    try:
        if path.is_dir():
            rows = _read_run(path, limit)
        elif path.name == ROLLOUT_FILE:
            rows = _rows(path, _read_waiting(path))
        elif path.suffix == ".npz":
            rows = _rows(path, decode(path.read_bytes()))
        else:
            rows = _read_lines(path, folder)
    except (CheckpointError, TrajectoryError, OSError, UnicodeDecodeError) as error:
        raise ModelError(f"calibration {path} cannot be read: {error}") from error
    for place, row in rows:
        if (unknown := next((token for token in row if not 0 <= token < vocabulary), None)) is not None:
            raise ModelError(
                f"{place}: holds token {unknown}, expected ids of 0 to {vocabulary - 1}; give what was tokenized with "
                f"the tokenizer of {folder}"
            )
    kept = [torch.tensor([row[:max_tokens]], dtype=torch.int64) for _, row in rows if len(row) > 1][:limit]
    if not kept:
        raise ModelError(
            f"calibration {path} holds no sequence of two or more tokens; give the output folder of a run with "
            "rollout.max_policy_lag above 0 (in a synchronous run no trajectory waits), or JSONL"
        )
    return kept


def _read_run(path: Path, limit: int) -> list[Row]:
    checkpoints = all_checkpoints(path.parent if path.name == FOLDER else path)
    if not checkpoints:
        raise ModelError(
            f"calibration {path}: neither a training checkpoint ({ROLLOUT_FILE}) nor a run's output folder with "
            f"some ({FOLDER}/update-N); give one of them, or JSONL"
        )
    rows: dict[str, Row] = {}  # by id: one may wait in more than one checkpoint
    failure = None
    for checkpoint in checkpoints:
        if len(rows) >= limit:
            break
        file = checkpoint / ROLLOUT_FILE
        try:
            waiting = [trajectory for trajectory in _read_waiting(file) if trajectory.id not in rows]
        except (CheckpointError, TrajectoryError, OSError) as error:  # damaged, or deleted by the run meanwhile
            failure = error
            print(f"{checkpoint} is skipped: {error}", file=sys.stderr, flush=True)
            continue
        rows |= zip([trajectory.id for trajectory in waiting], _rows(file, waiting), strict=True)
    if failure is not None and not rows:
        raise failure
    return list(rows.values())


def _read_waiting(file: Path) -> list[Trajectory]:
    state = read_state(file)
    return [*state.ready, *state.partial]


def _rows(path: Path, trajectories: Iterable[Trajectory]) -> list[Row]:
    return [(f"{path}, trajectory {t.id!r}", t.tokens.tolist()) for t in trajectories]


def _read_lines(path: Path, folder: str | Path) -> list[Row]:
    @functools.cache
    def tokenizer() -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder)

    lines = enumerate(path.read_text().splitlines(), 1)
    return [(f"{path}:{i}", _read_line(f"{path}:{i}", line, tokenizer)) for i, line in lines if line.strip()]


def _read_line(place: str, line: str, tokenizer: Callable[[], Any]) -> list[int]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ModelError(f"{place}: no JSON: {error}; write one object a line") from error
    if not isinstance(row, dict):
        raise ModelError(f'{place}: holds {type(row).__name__}; write an object, {{"tokens": [ids]}}')
    if isinstance(row.get("tokens"), list):
        for token in row["tokens"]:
            if type(token) is not int:  # a bool is an int
                raise ModelError(f"{place}: tokens holds {token!r}, expected ids, or give 'prompt' (text)")
        return list(row["tokens"])
    if isinstance(row.get("prompt"), str):
        return list(tokenizer()(row["prompt"])["input_ids"])
    raise ModelError(f"{place}: neither 'tokens' (ids) nor 'prompt' (text); give one of them")
