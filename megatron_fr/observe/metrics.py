"""The record of a run: one JSON object an update in ``metrics.jsonl``, the same numbers in TensorBoard."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

from megatron_fr.errors import MegatronFRError

METRICS_FILE = "metrics.jsonl"

Row = dict[str, float | int | bool | None]


class MetricsWriter(contextlib.AbstractContextManager["MetricsWriter"]):
    """Appends rows to the record in a run's folder, which is made when missing.

    Args:
        first_update: of the rows to come; TensorBoard hides what an earlier start wrote of it and of later ones.

    Raises:
        MegatronFRError: the folder cannot be written to.
    """

    def __init__(self, output_dir: str | Path, first_update: int = 0) -> None:
        folder = Path(output_dir)
        self.path = folder / METRICS_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.path.exists():  # cut off the line that a killed process left unfinished
                os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)
            # Unbuffered: after a failed write nothing is left that would fail again on closing.
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        from torch.utils.tensorboard import SummaryWriter  # slow: imports torch, which readers do not need

        try:
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_update)
        except OSError as error:
            self._file.close()
            raise _unwritable(folder / "tensorboard", error) from error

    def write(self, metrics: Mapping[str, SupportsFloat]) -> Row:
        """Append one row, and return it as written; it is on disk then.

        Args:
            metrics: numbers by name, ``update`` among them; Python, numpy or one-element torch numbers. JSON cannot
                hold values that are not finite: they are counted and written as null.

        Raises:
            MegatronFRError: the disk is full or gone.
            KeyError: ``update`` is missing.
        """
        step = int(float(metrics["update"]))
        row: Row = {name: _plain(value) for name, value in metrics.items()}
        row["metrics/non_finite"] = sum(value is None for value in row.values())
        line = memoryview((json.dumps(row, allow_nan=False) + "\n").encode())
        try:
            while line:
                line = line[self._file.write(line) :]
            self.path.stat()
        except FileNotFoundError as error:  # the open file would take rows that nobody finds
            raise MegatronFRError(
                f"{self.path} was deleted while the run wrote to it; set output to a folder that stays"
            ) from error
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            for name, value in row.items():
                if value is not None and name != "update":
                    self._board.add_scalar(name, float(value), step)
            self._board.flush()
        except OSError as error:
            raise _unwritable(Path(self._board.log_dir), error) from error
        return row

    def close(self) -> None:
        self._file.close()
        with contextlib.suppress(OSError):  # of rows whose write has raised it
            self._board.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[Row]:
    """Read a record's rows, one for each update, in order; successive rows of one update are merged.

    Updates that a resumed run repeats replace the earlier ones.

    Raises:
        MegatronFRError: the file is missing, holds no row, or has a damaged line, whose number the message gives.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise MegatronFRError(f"metrics {path}: {error.strerror}; give the folder of a run") from error
    rows: list[Row] = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):  # a line without newline is not finished
        try:
            row = json.loads(line)
            update = row["update"]
        except (ValueError, KeyError, TypeError) as error:
            raise MegatronFRError(f"metrics {path}, line {number} is damaged: {error!r}; delete that line") from error
        while rows and _update(rows[-1]) > update:
            rows.pop()
        merged = rows.pop() if rows and _update(rows[-1]) == update else {}
        rows.append({**merged, **row})
    if not rows:
        raise MegatronFRError(f"metrics {path} holds no update yet")
    return rows


def held_out(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[str, str]]:
    """List label and key of the evaluation metric ``name``, a pair for each set; the first set comes first."""
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("eval/") and key.endswith(f"/{name}"))
    return [(f"held-out {key[len('eval/') : -len(name)].strip('/')}".strip(), key) for key in keys]


def series(rows: list[Row], name: str) -> tuple[list[int], list[float]]:
    """Select the updates and values of one metric, without missing and null ones."""
    points = [(_update(row), value) for row in rows if (value := row.get(name)) is not None]
    return [update for update, _ in points], [float(value) for _, value in points]


def _update(row: Row) -> int:
    return int(row["update"] or 0)


def _plain(value: Any) -> float | int | bool | None:
    if isinstance(value, bool | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _unwritable(path: Path, error: OSError) -> MegatronFRError:
    remedy = "free space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "mend that"
    return MegatronFRError(f"cannot write {path}: {error.strerror}; {remedy} or set output to another folder")
