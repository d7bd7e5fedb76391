"""Control groups that bound the memory of all processes of a call together, where this process may make them."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

_SLACK_MB = 64  # page tables, the interpreter's own pages that a call changes
_ROOT = Path("/sys/fs/cgroup")


class MemoryGroups:
    """One group per running call, made on demand and used again. ``folder`` is None where none can be made."""

    def __init__(self) -> None:
        self.folder = _make_folder()
        self._free: dict[int, list[Path]] = {}
        self._made = itertools.count()

    def enter(self, pid: int, memory_mb: int) -> Path:
        """Put a process into a free group of ``memory_mb`` MiB; blocks for milliseconds, and may run in a thread."""
        assert self.folder is not None
        try:
            group = self._free.setdefault(memory_mb, []).pop()
        except IndexError:
            group = self.folder / str(next(self._made))
            group.mkdir()
            self._limit(group, memory_mb)
        (group / "cgroup.procs").write_text(str(pid))
        return group

    def give_back(self, group: Path, memory_mb: int) -> None:
        self._free[memory_mb].append(group)

    def _limit(self, group: Path, memory_mb: int) -> None:
        limit = str((memory_mb + _SLACK_MB) << 20)
        if (group / "memory.max").exists():
            (group / "memory.max").write_text(limit)
            with contextlib.suppress(OSError):  # no swap in this kernel
                (group / "memory.swap.max").write_text("0")
        else:
            (group / "memory.limit_in_bytes").write_text(limit)

    def close(self) -> None:
        """Remove the groups; their processes have ended."""
        if self.folder is not None:
            for group in (*self.folder.iterdir(), self.folder):
                if group.is_dir():
                    with contextlib.suppress(OSError):  # a process in it is still ending; it goes with its parent
                        group.rmdir()
        self.folder = None


def _make_folder() -> Path | None:
    """A folder for groups: below this process's own, in version 2 beside it, as a group with processes has none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base = _ROOT / "memory" / path.lstrip("/")
        elif not controllers and "memory" in _read(beside := (_ROOT / path.lstrip("/")).parent):
            base = beside
        else:
            continue
        folder = base / f"megatron-fr-tool-{os.getpid()}-{os.urandom(3).hex()}"
        try:
            folder.mkdir()
            if not controllers:
                (folder / "cgroup.subtree_control").write_text("+memory")
        except OSError:
            continue
        return folder
    return None


def _read(folder: Path) -> str:
    try:
        return (folder / "cgroup.subtree_control").read_text()
    except OSError:
        return ""
