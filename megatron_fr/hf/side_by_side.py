"""Files side by side in threads: copying and comparing hold no interpreter lock, and storage is faster with several."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from megatron_fr.errors import ConfigError

Progress = Callable[[str, int], None]
#: How many files a conversion writes, and parts of a model it compares, at a time unless told otherwise.
THREADS = 4


def even_parts(sizes: Sequence[int], count: int) -> list[range]:
    """Where to cut a row of things of these sizes into at most ``count`` parts, none empty, of about the same size."""
    total = max(1, sum(sizes))
    middles = (end - size / 2 for size, end in zip(sizes, itertools.accumulate(sizes), strict=True))
    length = Counter(min(count - 1, int(middle * count / total)) for middle in middles)
    ends = list(itertools.accumulate(length[i] for i in sorted(length)))
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def run_side_by_side[T](
    jobs: Sequence[Callable[[Progress], T]], threads: int, progress: Progress | None = None
) -> list[T]:
    """Call every job, at most ``threads`` at a time.

    When one fails, or the caller is interrupted, no other is begun, and those that run end at their next tensor.

    Args:
        jobs: each is given a function to call with the name and the bytes of every tensor that it is done with.
        progress: called with the same, by one job at a time.

    Returns:
        what the jobs returned, in their order.

    Raises:
        ConfigError: ``threads`` is below 1, or more than the system gives.
        Exception: the first failure of a job.
    """
    failures: list[BaseException] = []  # what stops the others; the first is the caller's
    turn = threading.Lock()

    def done(name: str, num_bytes: int) -> None:
        if failures:
            raise failures[0]
        if progress is not None:
            with turn:
                progress(name, num_bytes)

    def run(job: Callable[[Progress], T]) -> T:
        if failures:
            raise failures[0]
        try:
            return job(done)
        except BaseException as error:
            failures.append(error)
            raise

    if threads < 1:
        raise ConfigError(f"threads is {threads}, expected at least 1")
    with ThreadPoolExecutor(min(threads, len(jobs)), "side by side") as pool:
        try:
            try:
                running = [pool.submit(run, job) for job in jobs]
            except RuntimeError as error:  # the system gives no more threads
                raise ConfigError(f"{error}; threads is {threads}, use fewer") from error
            wait(running)
        except BaseException as error:  # Ctrl-C, too
            failures.append(error)
            raise
    if failures:
        raise failures[0]
    return [future.result() for future in running]
