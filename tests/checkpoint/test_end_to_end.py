"""The whole command with real engines: its trainer is killed with SIGKILL, and the same command goes on.

What the run leaves is then enough to convert and to quantise: its training checkpoint, and nothing else.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml
from safetensors.torch import load_file

from megatron_fr.agents.arithmetic import questions
from megatron_fr.checkpoint.store import ROLLOUT_FILE, all_checkpoints
from megatron_fr.convert.calibration import read_calibration
from megatron_fr.observe.metrics import read_metrics
from megatron_fr.rollout.state import read_state
from megatron_fr.runtime.spawn import tied_to_us
from tests.support.processes import command_of
from tools.tiny import make_untrained

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
TOOLS = Path(__file__).resolve().parents[2] / "tools"


def test_a_killed_trainer_goes_on_with_the_same_command_and_the_engines_get_its_weights(tmp_path: Path) -> None:
    model, output = make_untrained(tmp_path / "model"), tmp_path / "run"
    lines = [json.dumps(q.record()) for q in itertools.islice(questions(0, held_out=False), 200)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump(
            {
                "device": "cpu",
                "output": str(output),
                "model": {"path": str(model), "dtype": "float32"},
                "algorithm": {"advantage": "none"},
                "optimizer": {"lr": 1e-3},
                "train": {"num_updates": 6, "batch_size": 8, "skip_without_signal": False},
                "rollout": {
                    "max_concurrent_trajectories": 8,
                    "max_context": 384,
                    "max_new_tokens": 32,
                    "max_policy_lag": 2,
                },
                "agent": {"kind": "python_tool", "max_turns": 2, "tool": {"sandbox": "none"}},
                "reward": {"function": "megatron_fr.agents.arithmetic:exact_answer"},
                "data": {"train": str(tmp_path / "train.jsonl")},
                "sync": {"probe_tokens": 8, "max_probe_difference": 0.01},
                "checkpoint": {"every": 1, "keep_last": 7},
            }
        )
    )
    command = tied_to_us([sys.executable, "-m", "megatron_fr.cli", "train", "--config", str(tmp_path / "run.yaml")])
    log = tmp_path / "log"
    with log.open("w") as out:
        first = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            deadline = time.monotonic() + 300

            def until(condition: Callable[[], bool]) -> None:
                while not condition():
                    assert time.monotonic() < deadline, log.read_text()[-3000:]
                    assert first.poll() is None, log.read_text()[-3000:]
                    time.sleep(0.02)

            until(lambda: len(all_checkpoints(output)) > 0)
            (trainer,) = [p for p in psutil.Process(first.pid).children() if "megatron_fr.trainer" in command_of(p)]
            until(lambda: hold_up(trainer) and some_wait(output))
            trainer.send_signal(signal.SIGKILL)
            assert first.wait(60) == 1
        finally:
            first.kill()
    assert "ended with signal SIGKILL" in log.read_text()
    second = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert second.returncode == 0, second.stdout[-3000:] + second.stderr[-3000:]
    assert "going on after update" in second.stdout
    rows = read_metrics(output / "metrics.jsonl")
    assert [row["update"] for row in rows] == list(range(7))
    saved = output / "checkpoints" / "update-000006"
    model.rename(tmp_path / "elsewhere")

    newest = all_checkpoints(output)[0]
    use("convert_megatron_to_hf.py", newest, tmp_path / "hf", "--verify")
    weights, wanted = load_file(tmp_path / "hf" / "model.safetensors"), load_file(saved / "model.safetensors")
    assert weights.keys() == wanted.keys()
    assert all(tensor.equal(wanted[name]) for name, tensor in weights.items())
    assert {p.name for p in (tmp_path / "hf").iterdir()} == {p.name for p in saved.iterdir()}

    # The trajectories that waited are real ones, with prompts, tool calls and tool output.
    sequences = read_calibration(output, saved)
    assert len(sequences) > 1
    text = use("quantize_hf.py", saved, tmp_path / "fp8", "--calibration", output)
    error = re.search(r"mean ([\d.]+), max ([\d.]+) nats over (\d+) tokens", text)
    assert error is not None, text
    assert 0 < float(error[1]) < 0.5
    assert int(error[3]) == sum(ids.shape[1] - 1 for ids in sequences[1::2])


def hold_up(trainer: psutil.Process) -> bool:
    """Slower than the engines, the trainer leaves finished trajectories to wait; otherwise it is chance."""
    trainer.suspend()
    time.sleep(0.2)
    trainer.resume()
    time.sleep(0.08)
    return True


def some_wait(output: Path) -> bool:
    newest, *others = all_checkpoints(output)
    return bool(others) and len(read_state(newest / ROLLOUT_FILE).ready) > 1


def use(tool: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, str(TOOLS / tool), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
