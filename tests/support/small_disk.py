"""A disk that a test can fill."""

from __future__ import annotations

import shutil
from pathlib import Path


class SmallDisk:
    """A file system of its own, small enough to be filled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self, *, but: int) -> None:
        """Leave ``but`` bytes free."""
        with self._ballast.open("ab") as file:
            file.write(bytes(shutil.disk_usage(self.folder).free - but))

    def empty(self) -> None:
        """Undo :meth:`fill`."""
        self._ballast.unlink()
