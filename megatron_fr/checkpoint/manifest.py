"""A training checkpoint's ``manifest.json``: size and SHA-256 of every other file, written last. No torch.

Sizes tell a checkpoint that was cut off, in a moment; checksums tell one whose bytes changed, and read all of it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypedDict

from megatron_fr.checkpoint.locked_folder import sync_path
from megatron_fr.errors import CheckpointError, UnreadableCheckpointError

MANIFEST_FILE = "manifest.json"
RUN_FILE = "run.json"
_BLOCK = 1 << 20
_LARGE = 10e9
_THREADS = min(16, os.cpu_count() or 1)
#: What the kernel says of a file that is not there or is something else; anything else says nothing of its content.
_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}


class Entry(TypedDict):
    """What the manifest says of one file."""

    bytes: int
    sha256: str


def describe(path: Path, *, sync: bool = False, stop: Callable[[], bool] = lambda: False) -> Entry:
    """Read a file.

    Args:
        sync: first bring it to the disk.
        stop: asked every MiB; once it says so, the entry is of what was read so far.

    Raises:
        OSError: it cannot be read, or not be synced.
    """
    digest, size, block = hashlib.sha256(), 0, bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        while (count := file.readinto(block)) and not stop():
            digest.update(memoryview(block)[:count])
            size += count
    return {"bytes": size, "sha256": digest.hexdigest()}


def write_manifest(work: Path, known: Mapping[str, Entry], ignored: str) -> None:
    """Describe every file of ``work`` and bring it, the manifest and the folders to the disk.

    Args:
        known: entries of files that are on the disk already, by their path in ``work``; these are not read again.
        ignored: name of a file that does not belong to the checkpoint.

    Raises:
        OSError: the disk is full or gone.
    """
    inside = list(work.rglob("*"))
    names = {str(path.relative_to(work)) for path in inside if path.is_file() and path.name != ignored}
    unknown = sorted(names - known.keys() - {MANIFEST_FILE})
    with ThreadPoolExecutor(max_workers=_THREADS) as pool:
        found = dict(zip(unknown, pool.map(lambda name: describe(work / name, sync=True), unknown), strict=True))
    # Files that another machine wrote count even if this one's view of the folder does not show them yet.
    entries = dict(sorted({**found, **known}.items()))
    with (work / MANIFEST_FILE).open("w") as file:
        json.dump({"files": entries}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    for folder in (*(path for path in inside if path.is_dir()), work):
        sync_path(folder)


def check_sizes(folder: Path) -> dict[str, Entry]:
    """Compare every file's size with the manifest, and the checksum of ``run.json``; reads nothing large.

    Returns:
        the manifest's entries.

    Raises:
        UnreadableCheckpointError: files cannot be looked at, which says nothing of what they hold.
        CheckpointError: the checkpoint is incomplete or damaged.
    """
    with _explained(MANIFEST_FILE):
        text = (folder / MANIFEST_FILE).read_bytes()
    try:
        entries: dict[str, Entry] = {
            str(name): {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
            for name, entry in json.loads(text)["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST_FILE} is damaged: {error!r}") from error
    for name, entry in entries.items():
        with _explained(name):
            size = (folder / name).stat().st_size
        if size != entry["bytes"]:
            raise CheckpointError(f"{name} has {size} bytes, expected {entry['bytes']}")
    if RUN_FILE not in entries:
        raise CheckpointError(f"{MANIFEST_FILE} does not name {RUN_FILE}")
    check_sum(folder, RUN_FILE, entries[RUN_FILE])
    return entries


def check_sum(folder: Path, name: str, entry: Entry, stop: Callable[[], bool] = lambda: False) -> None:
    """Compare one file's checksum with its entry; after ``stop`` says so, nothing is compared.

    Raises:
        UnreadableCheckpointError: it cannot be read, which says nothing of what it holds.
        CheckpointError: it holds something else, or is not there.
    """
    with _explained(name):
        found = describe(folder / name, stop=stop)
    if not stop() and found["sha256"] != entry["sha256"]:
        raise CheckpointError(f"{name} has another checksum than {MANIFEST_FILE} says")


def announce(folder: Path, entries: Mapping[str, Entry], say: Callable[[str], None]) -> None:
    """Say what is about to be read where that takes more than a few seconds."""
    if (size := sum(entry["bytes"] for entry in entries.values())) > _LARGE:
        say(f"comparing checksums of {size / 1e9:.0f} GB in {folder}")


def shares(entries: Mapping[str, Entry], number: int) -> list[dict[str, Entry]]:
    """Who reads what: the largest files first, each to the one with the fewest bytes so far."""
    parts: list[dict[str, Entry]] = [{} for _ in range(number)]
    loads = [0] * number
    for name, entry in sorted(entries.items(), key=lambda item: (-item[1]["bytes"], item[0])):
        least = loads.index(min(loads))
        parts[least][name] = entry
        loads[least] += entry["bytes"]
    return parts


class SumCheck:
    """Compares files with their checksums, in threads; use it as a context, which ends them.

    Args:
        entries: of the files to read, by their path in ``folder``.
    """

    def __init__(self, folder: Path, entries: Mapping[str, Entry], threads: int = _THREADS) -> None:
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="checksum")
        self._files: list[Future[None]] = [
            self._pool.submit(check_sum, folder, name, entry, self._stop.is_set) for name, entry in entries.items()
        ]

    def __enter__(self) -> SumCheck:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def through(self, within_s: float) -> bool:
        """Wait up to ``within_s`` seconds; true once all files hold.

        Raises:
            CheckpointError: one does not; see :func:`check_sum`.
        """
        done, pending = wait(self._files, timeout=within_s, return_when=FIRST_EXCEPTION)
        for file in done:
            file.result()
        return not pending


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NOT_THERE:
            raise CheckpointError(f"{name} is missing") from error
        raise UnreadableCheckpointError(
            f"{name} cannot be read now ({error.strerror}), which is no sign of damage: mend the access to it"
        ) from error
