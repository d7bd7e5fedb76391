from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megatron_fr.supervisor import _reason


def test_a_child_without_last_words_is_not_given_those_of_an_earlier_run(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    log.write_text("error: the disk was full\n")
    start = log.stat().st_size
    child = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    child.wait()
    assert "SIGKILL" in _reason(log, "trainer rank 0", child, start)
    assert _reason(log, "trainer rank 0", child, 0) == "the disk was full"
