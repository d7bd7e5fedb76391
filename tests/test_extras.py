"""Optional packages: the main job goes on without them, what needs them names the extra."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fr.errors import ConfigError
from megatron_fr.trainer.distributed import bootstrap


def test_a_report_without_matplotlib_says_which_extra_draws_the_picture(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"update": 1, "version": 1, "reward/mean": 0.5}) + "\n")
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        f"from megatron_fr.observe.report import report_run; print(report_run({str(tmp_path)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 updates" in done.stdout
    assert done.stdout.splitlines()[-1] == (
        "No run.png: the package matplotlib is not installed; pip install 'megatron-fr[plot]' brings it"
    )


def test_mpi_ranks_without_mpi4py_are_told_the_extra_and_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigError, match=r"mpi4py is not installed; pip install 'megatron-fr\[mpi\]'.*MASTER_ADDR"):
        bootstrap({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"})
