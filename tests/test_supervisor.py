from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fr.cli.train import Supervisor, _reason
from megatron_fr.errors import MegatronFRError


def test_a_child_without_last_words_is_not_given_those_of_an_earlier_run(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    log.write_text("error: the disk was full\n")
    start = log.stat().st_size
    child = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    child.wait()
    assert "SIGKILL" in _reason(log, "trainer rank 0", child, start)
    assert _reason(log, "trainer rank 0", child, 0) == "the disk was full"


def test_a_killed_rollout_service_is_the_reason_and_not_the_ranks_that_miss_it(tmp_path: Path) -> None:
    supervisor = Supervisor.__new__(Supervisor)
    supervisor._logs, supervisor._log_starts, supervisor._signals = tmp_path, {}, 0
    (tmp_path / "trainer-0.log").write_text("error: the rollout service is gone\n")
    supervisor._service = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    supervisor._service.wait()
    rank = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    rank.wait()
    supervisor._ranks = [rank]
    with pytest.raises(MegatronFRError, match="the rollout service ended with signal SIGKILL"):
        supervisor._watch()


def test_nothing_slow_is_imported_before_the_service_starts() -> None:
    code = "import sys, megatron_fr.cli.train; print({'torch', 'matplotlib', 'transformers'} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found == "set()\n"
