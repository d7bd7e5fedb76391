"""Words of failures of one run on one machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fr.cli.train import Child, raise_failure
from megatron_fr.errors import MegatronFRError


def dead(name: str, code: str, log: Path, start: int = 0) -> Child:
    """A process that has ended, with the log as it is."""
    process = subprocess.Popen([sys.executable, "-c", code])
    process.wait()
    return Child(name, process, log, start)


KILLED = "import os; os.kill(os.getpid(), 9)"


def test_a_child_without_an_error_is_not_given_that_of_an_earlier_run(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    log.write_text("error: the disk was full\n")
    assert "SIGKILL" in dead("trainer rank 0", KILLED, log, log.stat().st_size).reason()
    assert dead("trainer rank 0", KILLED, log).reason() == "the disk was full"


def test_a_killed_rollout_service_is_the_reason_and_not_the_ranks_that_miss_it(tmp_path: Path) -> None:
    (tmp_path / "rollout.log").touch()
    (tmp_path / "trainer-0.log").write_text("error: the rollout service is gone\n")
    service = dead("the rollout service", KILLED, tmp_path / "rollout.log")
    rank = dead("trainer rank 0", "raise SystemExit(1)", tmp_path / "trainer-0.log")
    with pytest.raises(MegatronFRError, match="the rollout service ended with signal SIGKILL"):
        raise_failure(service, [rank])


def test_an_error_of_the_service_comes_before_that_of_the_rank(tmp_path: Path) -> None:
    (tmp_path / "rollout.log").write_text("error: engine 0 died\n")
    (tmp_path / "trainer-0.log").write_text("error: no connection\n")
    service = dead("the rollout service", "raise SystemExit(1)", tmp_path / "rollout.log")
    rank = dead("trainer rank 0", "raise SystemExit(1)", tmp_path / "trainer-0.log")
    with pytest.raises(MegatronFRError, match=r"^engine 0 died\ntrainer rank 0: no connection$"):
        raise_failure(service, [rank])
    raise_failure(service, [])


def test_nothing_slow_is_imported_before_the_service_starts() -> None:
    code = "import sys, megatron_fr.cli.train; print({'torch', 'matplotlib', 'transformers'} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found == "set()\n"
