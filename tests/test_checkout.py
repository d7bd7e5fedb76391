"""A checkout wherever it lies, and the commands that the README names."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fr.cli.__main__ import main
from megatron_fr.rollout.__main__ import main as rollout

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_commands_start_from_a_path_with_spaces_that_no_first_line_of_a_script_could_hold(tmp_path: Path) -> None:
    folder = tmp_path / "my clones" / ("x" * 200) / ("y" * 100)
    left = shutil.ignore_patterns(".*", "runs", "shared", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, folder, ignore=left)
    env = subprocess.run(["bash", "launch/env.sh"], cwd=folder, capture_output=True, text=True)
    python = Path(env.stdout.strip())
    assert python.is_relative_to(folder), env.stderr
    for command in (["megatron-fr", "--version"], ["torchrun", "--help"], ["lint-imports", "--help"]):
        done = subprocess.run([python.parent / command[0], *command[1:]], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    own = ["-c", "import megatron_fr; print(megatron_fr.__file__)"]
    start = [python.parent / "torchrun", "--no-python", python, *own]
    done = subprocess.run(start, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip().startswith(str(folder)), done.stderr


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`megatron-fr (\w+)", README))))
def test_the_readme_names_commands_that_there_are(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = set(shlex.split(" ".join(re.findall(rf"`megatron-fr {command} ([^`]*)`", README))))
    with pytest.raises(SystemExit, match=r"^0$"):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert all(option in text for option in given if option.startswith("--"))


def test_the_readme_starts_the_rollout_service_with_options_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        rollout(["--help"])
    given = re.findall(r"`python -m megatron_fr.rollout ([^`]*)`", README)
    assert given
    text = capsys.readouterr().out
    assert all(option in text for option in shlex.split(given[0]) if option.startswith("--"))


@pytest.mark.slow
@pytest.mark.parametrize("tool", sorted(set(re.findall(r"`(tools/\w+\.py)`", README))))
def test_the_tools_that_the_readme_names_start(tool: str) -> None:
    done = subprocess.run([sys.executable, ROOT / tool, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
