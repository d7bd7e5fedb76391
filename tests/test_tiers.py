"""What tests/run.sh asks of pytest: a skip that fails, and a fast tier without ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]


def pytest_output(folder: Path, text: str, *options: str) -> str:
    (folder / "test_probe.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", *options]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout


def test_with_no_skips_a_skipped_test_or_file_fails_and_an_expected_failure_does_not(tmp_path: Path) -> None:
    text = (
        "import pytest\ndef test_a(): pytest.skip('needs bubblewrap')\n"
        "@pytest.mark.xfail(strict=True)\ndef test_b(): assert False\ndef test_c(): pass\n"
    )
    assert "1 passed, 1 skipped, 1 xfailed" in pytest_output(tmp_path, text)
    strict = pytest_output(tmp_path, text, "--no-skips")
    assert "1 failed, 1 passed, 1 xfailed" in strict
    assert "needs bubblewrap; in this tier nothing may be skipped" in strict
    whole_file = "import pytest\npytest.importorskip('no_such_package')\n"
    assert "1 error" in pytest_output(tmp_path, whole_file, "--no-skips")


def test_the_fast_tier_refuses_a_test_that_starts_ranks(tmp_path: Path) -> None:
    text = "import os\nfrom tests.support.parallel_launch import run_ranks\ndef test_a(): run_ranks(os.getpid, 1)\n"
    assert "mark it with pytest.mark.slow" in pytest_output(tmp_path, text, "-m", "not slow")
