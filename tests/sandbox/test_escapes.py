"""Every attempt to leave the sandbox fails, as root and as an ordinary user."""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.escapes import CALLS, PAIRS, SUM

ROOT = Path(__file__).resolve().parents[2]
IS_ROOT = os.geteuid() == 0
KEYS = [f"call: {case.title}" for case in CALLS] + [f"pair: {pair.title}" for pair in PAIRS]

#: Opens to everybody what lies in root's home of interpreter and checkout; then becomes somebody.
AS_USER = """
set -e
umask 022
KEEP=$(mktemp -d)
n=0
for folder in "$@"; do n=$((n + 1)); mkdir -p "$KEEP/$n"; mount --bind "$folder" "$KEEP/$n"; done
mount -t tmpfs -o mode=755 none /root
n=0
for folder in "$@"; do
  n=$((n + 1)); mkdir -p "$folder"; mount --bind "$KEEP/$n" "$folder"; umount "$KEEP/$n"; rmdir "$KEEP/$n"
done
rmdir "$KEEP"
exec setpriv --reuid=12345 --regid=12345 --clear-groups --inh-caps=-all "$PYTHON" -B -m tests.sandbox.attack
"""

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the programs have numbers of x86-64 calls")
as_root = pytest.param(
    "root", marks=[pytest.mark.slow, pytest.mark.skipif(not IS_ROOT, reason="the tests are not run as root")]
)
as_user = pytest.param("user", marks=[pytest.mark.slow, pytest.mark.exhaustive])


@functools.cache
def attack(user: str) -> dict[str, Any]:
    """Outputs of all attempts, by title."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(Path.home())}
    command = [sys.executable, "-B", "-m", "tests.sandbox.attack"]
    if user == "user" and IS_ROOT:
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv: install the package util-linux")
        import numpy

        folders = [sys.base_prefix, str(Path(numpy.__file__).parents[4]), sys.prefix, str(ROOT)]
        inside = [folder for folder in folders if folder.startswith("/root/")]
        command = ["unshare", "--mount", "bash", "-c", AS_USER, "bash", *dict.fromkeys(inside)]
        environment |= {"PYTHON": sys.executable, "HOME": "/nonexistent"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def judge(output: str) -> None:
    assert "ESCAPE" not in output
    assert "held" in output, output


@pytest.mark.parametrize("user", [as_root, as_user])
@pytest.mark.parametrize("title", KEYS)
def test_the_attempt_fails(user: str, title: str) -> None:
    judge(attack(user)["outputs"][title])


@pytest.mark.parametrize("user", [as_root, as_user])
def test_what_was_planted_is_as_it_was_and_the_user_is_the_right_one(user: str) -> None:
    found = attack(user)
    assert found["intact"]
    assert (found["uid"] == 0) == (user == "root")


@pytest.mark.parametrize("user", [as_root, as_user])
def test_the_memory_of_many_processes_is_bounded(user: str, request: pytest.FixtureRequest) -> None:
    found = attack(user)
    if "no control group" in found["measures"]["memory"]:
        reason = "no control group is delegated here; SECURITY.md, memory of many processes"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    judge(found["outputs"][f"call: {SUM.title}"])


def test_there_are_sixty_attempts_of_different_names() -> None:
    assert len(set(KEYS)) == len(KEYS) >= 60
