"""Files written side by side: results in order, and what a failure does to the others."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from megatron_fr.errors import ConfigError, ModelError
from megatron_fr.hf.side_by_side import Progress, even_parts, run_side_by_side


def test_results_have_the_order_of_the_jobs_and_every_tensor_is_reported_by_one_thread_at_a_time() -> None:
    together = threading.Barrier(3, timeout=30)
    inside, reports = [0], []

    def job(number: int, progress: Progress) -> int:
        together.wait()  # passes only where three run at a time
        for i in range(100):
            progress(f"{number}.{i}", number)
        return number

    def report(name: str, num_bytes: int) -> None:
        inside[0] += 1
        time.sleep(1e-5)  # lets another thread in
        assert inside[0] == 1
        reports.append((name, num_bytes))
        inside[0] -= 1

    assert run_side_by_side([partial(job, number) for number in range(6)], 3, report) == list(range(6))
    assert sorted(reports) == sorted((f"{number}.{i}", number) for number in range(6) for i in range(100))


def test_after_a_failure_no_job_is_begun_and_running_ones_end_at_their_next_tensor() -> None:
    begun, reported = [], []
    running, failed = threading.Event(), threading.Event()

    def endless(progress: Progress) -> None:
        begun.append("endless")
        running.set()
        failed.wait(30)
        for i in range(10**6):
            progress("tensor", i)
            failed.wait(1e-4)
        raise AssertionError("it was never stopped")

    def failing(progress: Progress) -> None:
        begun.append("failing")
        running.wait(30)
        failed.set()
        raise ModelError("model-00002.safetensors: tensor 'b' cannot be written: No space left on device")

    def never(progress: Progress) -> None:
        begun.append("never")

    jobs = [endless, failing, *[never] * 5]
    with pytest.raises(ModelError, match="No space left on device"):
        run_side_by_side(jobs, 2, lambda name, size: reported.append(size))
    assert sorted(begun) == ["endless", "failing"]
    assert len(reported) < 10**6
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("side by side")]


def test_parts_are_about_even_and_cover_everything_in_order() -> None:
    assert even_parts([3, 1, 4, 1, 5, 9, 2, 6], 1) == [range(8)]
    assert even_parts([10] * 8, 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert even_parts([100, 1, 1], 3) == [range(0, 1), range(1, 3)]  # no part is empty
    assert even_parts([10, 10, 0], 2) == [range(0, 1), range(1, 3)]
    assert even_parts([0, 0], 4) == [range(2)]  # a rank that holds nothing but what has no size
    generator = random.Random(0)
    for _ in range(100):
        sizes = [generator.randrange(1, 1000) for _ in range(generator.randrange(1, 60))]
        parts = even_parts(sizes, 4)
        assert [i for part in parts for i in part] == list(range(len(sizes)))
        assert max(sum(sizes[i] for i in part) for part in parts) <= sum(sizes) / 4 + max(sizes)


def test_an_interruption_while_jobs_are_being_handed_out_begins_no_other() -> None:
    begun = []

    def job(progress: Progress) -> None:
        begun.append(1)
        time.sleep(0.01)

    class Jobs(list[Callable[[Progress], None]]):
        def __iter__(self) -> Iterator[Callable[[Progress], None]]:
            yield from super().__iter__()
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            run_side_by_side(Jobs([job] * 500), 4)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(begun) < 500


def test_no_thread_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="threads is 0, expected at least 1"):
        run_side_by_side([lambda progress: None], 0)
