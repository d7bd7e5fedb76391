"""A run's weights as Hugging Face folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


class WeightExport:
    """Writes each update's weights once to ``output/checkpoints/update-N``.

    Args:
        write: writes the current weights as a complete folder; a collective.
    """

    def __init__(self, output: Path, write: Callable[[Path], None]) -> None:
        self._output = output
        self._write = write
        self._saved = -1

    def save(self, update: int) -> Path:
        """The folder of the current weights, which ``update`` made.

        A folder that this process did not write is replaced: it may hold the weights of an earlier run.

        Raises:
            ModelError: it cannot be written.
        """
        folder = self._output / "checkpoints" / f"update-{update:06d}"
        if self._saved != update:
            self._write(folder)
            self._saved = update
        return folder
