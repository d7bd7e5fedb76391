"""Token sequences to calibrate a quantisation on: recorded trajectories, or JSONL.

Training checkpoints hold the finished trajectories that wait for their update (``rollout.state``). Any number may wait
in one checkpoint, also none, so a run's folder gives those of all its checkpoints.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_fr.checkpoint.store import FOLDER, ROLLOUT_FILE, all_checkpoints
from megatron_fr.errors import CheckpointError, ModelError, TrajectoryError
from megatron_fr.hf.folder import read_spec
from megatron_fr.rollout.state import read_state
from megatron_fr.trajectory import decode

#: Tokens used of one sequence.
_MAX_TOKENS = 4096
#: A place to name in errors, and token ids.
type _Row = tuple[str, list[int]]


def read_calibration(path: str | Path, folder: str | Path, *, limit: int = 64) -> list[torch.Tensor]:
    """Token ids of recorded trajectories, or of JSONL with ``tokens`` or ``prompt`` in each line.

    Args:
        path: a run's output folder or the ``training_state`` in it (its checkpoints, newest first; one that cannot be
            read is skipped with a message), one training checkpoint (its folder or its ``rollout.state``), an archive
            of trajectories (npz), or JSONL.
        folder: of the model, for its tokenizer.

    Returns:
        int64 tensors ``[1, tokens]``, at most ``limit``.

    Raises:
        ModelError: there is none; or names a line that is none, or what has a token that the vocabulary lacks.
    """
    path, vocabulary = Path(path), read_spec(folder).vocab
    if (path / ROLLOUT_FILE).exists():
        path = path / ROLLOUT_FILE
    try:
        if path.is_dir():
            rows = _read_run(path, limit)
        elif path.name == ROLLOUT_FILE or path.suffix == ".npz":
            rows = list(_read_trajectories(path).values())
        else:
            with path.open(encoding="utf-8") as lines:
                places = [(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
            rows = [(place, _read_line(place, line, folder)) for place, line in places]
    except (CheckpointError, TrajectoryError, OSError, UnicodeDecodeError) as error:
        raise ModelError(f"calibration {path} cannot be read: {error}") from error
    for place, row in rows:
        if unknown := [token for token in row if not 0 <= token < vocabulary]:
            raise ModelError(
                f"{place}: holds token {unknown[0]}, expected ids of 0 to {vocabulary - 1}; give what was tokenized "
                f"with the tokenizer of {folder}"
            )
    kept = [torch.tensor([row[:_MAX_TOKENS]], dtype=torch.int64) for _, row in rows if len(row) > 1][:limit]
    if not kept:
        raise ModelError(
            f"calibration {path} holds no sequence of two or more tokens; give the output folder of a run with "
            "rollout.max_policy_lag above 0 (in a synchronous run no trajectory waits), or JSONL"
        )
    return kept


def _read_run(path: Path, limit: int) -> list[_Row]:
    checkpoints = all_checkpoints(path.parent if path.name == FOLDER else path)
    if not checkpoints:
        raise ModelError(
            f"calibration {path}: neither a training checkpoint ({ROLLOUT_FILE}) nor a run's output folder with "
            f"some ({FOLDER}/update-N); give one of them, or JSONL"
        )
    rows: dict[str, _Row] = {}  # by id: one may wait in more than one checkpoint
    failure = None
    for checkpoint in checkpoints:
        try:
            for name, row in _read_trajectories(checkpoint / ROLLOUT_FILE).items():
                rows.setdefault(name, row)
        except (CheckpointError, TrajectoryError, OSError) as error:  # damaged, or deleted by the run meanwhile
            failure = error
            print(f"{checkpoint} is skipped: {error}", file=sys.stderr, flush=True)
        if len(rows) >= limit:
            break
    if failure is not None and not rows:
        raise failure
    return list(rows.values())


def _read_trajectories(file: Path) -> dict[str, _Row]:
    state = None if file.suffix == ".npz" else read_state(file)
    found = decode(file.read_bytes()) if state is None else [*state.ready, *state.partial]
    return {t.id: (f"{file}, trajectory {t.id!r}", t.tokens.tolist()) for t in found}


@functools.cache
def _tokenizer(folder: str | Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # unsaid, it asks on a terminal


def _read_line(place: str, line: str, folder: str | Path) -> list[int]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{place}: no JSON: {error}; write one object a line") from error
    if not isinstance(row, dict):
        raise ModelError(f'{place}: holds {type(row).__name__}; write an object, {{"tokens": [ids]}}')
    if isinstance(tokens := row.get("tokens"), list):
        for token in tokens:
            if type(token) is not int:  # a bool is an int
                raise ModelError(f"{place}: tokens holds {token!r}, expected ids, or give 'prompt' (text)")
        return tokens
    if isinstance(row.get("prompt"), str):
        return list(_tokenizer(folder)(row["prompt"])["input_ids"])
    raise ModelError(f"{place}: neither 'tokens' (ids) nor 'prompt' (text); give one of them")
