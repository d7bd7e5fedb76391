"""Words of failures of one run on one machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_fr.checkpoint.fixed import run_settings
from megatron_fr.checkpoint.store import RunRecord, complete, work_folder
from megatron_fr.cli.train import Child, Supervisor, raise_failure
from megatron_fr.config import RunConfig
from megatron_fr.errors import MegatronFRError
from megatron_fr.runtime.console import say_what_is_awaited
from tests.support.small_disk import SmallDisk


def dead(name: str, code: str, log: Path) -> Child:
    """A process that has ended."""
    child = Child.spawn(name, log, ["-c", code], {})
    child.process.wait()
    return child


KILLED = "import os; os.kill(os.getpid(), 9)"
SIGKILL = "ended with signal SIGKILL (out of memory, or killed by hand)"
NO_ANSWER = "raise SystemExit('error: nobody answers')"


def test_a_child_without_an_error_is_not_given_that_of_an_earlier_run(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    log.write_text("error: the disk was full\n")
    assert dead("trainer rank 0", KILLED, log).reason() == f"trainer rank 0 {SIGKILL}"
    assert dead("trainer rank 0", NO_ANSWER, log).reason() == "nobody answers"
    assert log.read_text() == "error: the disk was full\nerror: nobody answers\n"


def test_warnings_are_no_reason_why_a_child_ended(tmp_path: Path) -> None:
    warn = "import warnings; [warnings.warn('old', DeprecationWarning) for _ in '12']; print('A IS DEPRECATED'); "
    child = dead("trainer rank 0", f"{warn}print('loading');{KILLED}", tmp_path / "log")
    text = child.reason()
    assert "DeprecationWarning" in (tmp_path / "log").read_text()
    assert text.splitlines()[0] == f"trainer rank 0 {SIGKILL}; last lines of {tmp_path / 'log'}:"
    assert text.splitlines()[1:] == ["loading"]


def test_the_reason_outlives_a_full_disk_and_a_deleted_folder(tmp_path: Path, small_disk: SmallDisk) -> None:
    log = small_disk.folder / "log"
    log.touch()
    small_disk.fill(but=0)
    assert dead("trainer rank 0", NO_ANSWER, log).reason() == "nobody answers"
    assert log.read_text() == ""
    assert dead("trainer rank 0", NO_ANSWER, tmp_path / "gone" / "log").reason() == "nobody answers"


def test_a_killed_rollout_service_is_the_reason_and_not_the_ranks_that_miss_it(tmp_path: Path) -> None:
    service = dead("the rollout service", KILLED, tmp_path / "rollout.log")
    rank = dead("trainer rank 0", NO_ANSWER, tmp_path / "trainer-0.log")
    with pytest.raises(MegatronFRError, match="the rollout service ended with signal SIGKILL"):
        raise_failure(service, [rank])


def test_an_error_of_the_service_comes_before_that_of_the_rank(tmp_path: Path) -> None:
    service = dead("the rollout service", "raise SystemExit('error: engine 0 died')", tmp_path / "rollout.log")
    rank = dead("trainer rank 0", NO_ANSWER, tmp_path / "trainer-0.log")
    with pytest.raises(MegatronFRError, match=r"^engine 0 died\ntrainer rank 0: nobody answers$"):
        raise_failure(service, [rank])
    raise_failure(service, [])


def run_config(output: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "device": "cpu",
            "output": output,
            "model": {"path": "unused/unused"},
            "train": {"num_updates": 1},
            "reward": {"function": "unused:unused"},
            "data": {"train": "unused.jsonl"},
        }
    )


def test_the_same_command_twice_is_refused_at_once_by_the_name_of_the_first(tmp_path: Path) -> None:
    first = Supervisor(run_config(tmp_path))
    with pytest.raises(MegatronFRError, match=rf"is in use by process {os.getpid()} on .*give each run its own output"):
        Supervisor(run_config(tmp_path))
    del first


@pytest.mark.slow
def test_a_failing_start_leaves_a_finished_run_as_it_was_and_its_reason_comes_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"config.yaml": "seed: 1\n", "metrics.jsonl": '{"update": 1, "reward/mean": 0.5}\n'}
    for name, text in record.items():
        (tmp_path / name).write_text(text)
    config = run_config(tmp_path)
    bad = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path)})})
    assert Supervisor(bad).run() == 1
    said = capsys.readouterr()
    assert said.err.splitlines()[-1].startswith("error: model.path=")
    assert "Results in" not in said.out
    assert {name: (tmp_path / name).read_text() for name in record} == record


def test_a_changed_setting_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(tmp_path)
    settings = run_settings(config) | {"train.batch_size": 64, "model.layers": 2}
    complete(work_folder(tmp_path, 3), RunRecord(3, 3, fixed=settings))
    assert Supervisor(config).run() == 1
    error = capsys.readouterr().err
    assert "is of another run (train.batch_size: 64 then, 128 now); undo the change" in error
    assert not (tmp_path / "logs" / "rollout.log").exists()


STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


@pytest.mark.parametrize("saved", [False, True])
def test_a_second_interruption_kills_the_trainer_and_says_what_the_next_start_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: bool
) -> None:
    folder = complete(work_folder(tmp_path, 3), RunRecord(3, 3)) if saved else None
    supervisor = Supervisor(run_config(tmp_path))
    supervisor._ranks.append(rank := Child.spawn("trainer rank 0", tmp_path / "log", ["-c", STUBBORN], {}))
    try:
        while rank.last_line() != "up":
            time.sleep(0.01)
        supervisor._signals = 1
        threading.Timer(0.5, supervisor._on_signal).start()
        then = f"goes on from {folder}" if saved else "begins again: there is no training checkpoint yet"
        with pytest.raises(
            MegatronFRError, match=rf"was interrupted again before it had saved, .*; the same command {then}$"
        ):
            supervisor._wait_for_ranks()
    finally:
        rank.kill_tree()
    assert "and stops, within 300 s (checkpoint.stop_grace_s); Ctrl-C again kills it unsaved" in capsys.readouterr().out


def test_a_wait_says_what_for(capsys: pytest.CaptureFixture[str]) -> None:
    with say_what_is_awaited(lambda: "rank 3", every_s=0.05):
        time.sleep(0.3)
    said = capsys.readouterr().out.splitlines()
    assert len(said) > 2
    assert said[0] == "waiting for rank 3; 0 s so far"
    time.sleep(0.2)
    assert capsys.readouterr().out == ""


def test_nothing_slow_is_imported_before_the_service_starts() -> None:
    code = "import sys, megatron_fr.cli.train; print({'torch', 'matplotlib', 'transformers'} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found == "set()\n"
