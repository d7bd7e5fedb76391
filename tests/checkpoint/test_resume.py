"""Kill -9 of the trainer, then the same command: it goes on as if nothing had happened. Engines are left out here."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_fr.checkpoint.store import ROLLOUT_FILE, all_checkpoints, newest_usable
from megatron_fr.config import RunConfig, load_config
from megatron_fr.observe.metrics import read_metrics
from megatron_fr.rollout.cursor import PromptCursor
from megatron_fr.rollout.state import read_state
from tests.support.parallel_launch import end_process, fork_process
from tests.support.recorded import PROMPTS, VOCAB, Server
from tools.tiny import make_untrained

pytestmark = pytest.mark.slow

#: Metrics that follow from the prompts used, the weights, Adam's moments and the schedule; not from the clock.
SAME = (
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "trust_region/seq_kl_mean",
    "policy/entropy",
    "reward/mean",
    "policy_lag/mean",
)


def trainer_process(arguments: list[str]) -> None:
    """What ``python -m megatron_fr.trainer`` does, where its modules are imported already."""
    sys.argv = ["trainer", *arguments]
    runpy.run_module("megatron_fr.trainer", run_name="__main__")


class Run:
    """One output folder, and the trainer as a process of its own."""

    def __init__(self, folder: Path, model: Path, algorithm: dict[str, Any] | None = None) -> None:
        self.output = folder / "run"
        self.trainer: list[BaseProcess] = []
        self.used: dict[int, list[tuple[str, str]]] = {}  # see Server; the latest attempt at each update
        values = {
            "device": "cpu",
            "output": str(self.output),
            "model": {"path": str(model), "dtype": "float32"},
            "optimizer": {"lr": 1e-3, "warmup_fraction": 0.3},
            "algorithm": algorithm or {"delta": 0.5},
            "train": {"num_updates": 6, "batch_size": 4, "micro_batch_size": 2, "routing_replay": "off"},
            "rollout": {"max_concurrent_trajectories": 6, "max_context": 64, "max_new_tokens": 32, "max_policy_lag": 2},
            "reward": {"function": "unused:unused"},
            "data": {"train": "unused.jsonl"},
            "sync": {"probe_tokens": 0, "timeout_s": 60},
            "checkpoint": {"every": 2, "keep_last": 3},
        }
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log"
        self.file = folder / "run.yaml"
        self.file.write_text(yaml.safe_dump(values))
        self.config: RunConfig = load_config(self.file)

    def train(self, kill_when: Callable[[str, str, int], bool] | None = None, *overrides: str) -> tuple[int, str]:
        """Run the trainer to its end; ``kill_when`` sees every request to the service and may end it with SIGKILL."""
        trainer = self.trainer = []

        def watch(method: str, path: str, committed: int) -> None:
            if kill_when is not None and kill_when(method, path, committed):
                trainer[0].kill()

        folder = newest_usable(self.output)
        restored = read_state(folder / ROLLOUT_FILE) if folder is not None else None
        with Server(self.config, restored, watch) as server:
            arguments = ["--config", str(self.file), "--service", server.url, *overrides]  # goes on by itself
            self.log.unlink(missing_ok=True)
            trainer.append(fork_process(trainer_process, self.log, {}, arguments))
            try:
                trainer[0].join(timeout=200)
                assert trainer[0].exitcode is not None, f"it still runs:\n{self.log.read_text()}"
            finally:
                end_process(trainer[0])
            self.used |= server.used
        code = trainer[0].exitcode
        assert code is not None
        return code, self.log.read_text()

    def wait_for_writer(self, update: int) -> None:
        """Until the trainer's thread has written this checkpoint; it gets its name after the next update."""
        work, deadline = self.output / "training_state" / f"update-{update:06d}.tmp", time.monotonic() + 60
        while not (work / ".metadata").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.5)  # that file is the last one; the thread only has to say so

    def rows(self) -> list[dict[str, Any]]:
        """The deterministic metrics, one row an update."""
        return [{name: row.get(name) for name in ("update", "version", *SAME)} for row in read_metrics(self.metrics)]

    @property
    def metrics(self) -> Path:
        return self.output / "metrics.jsonl"

    def weights(self) -> bytes:
        return (self.output / "checkpoints" / "update-000006" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_untrained(tmp_path_factory.mktemp("model") / "m", family="qwen3_moe", vocab_size=VOCAB)


def test_metrics_and_weights_after_kills_equal_those_of_an_uninterrupted_run(tmp_path: Path, model: Path) -> None:
    whole = Run(tmp_path / "whole", model)
    code, text = whole.train()
    assert code == 0, text
    assert [p.name for p in all_checkpoints(whole.output)] == ["update-000006", "update-000004", "update-000002"]
    rows = whole.rows()
    assert [row["update"] for row in rows] == list(range(7))
    assert any(row["train/grad_norm"] for row in rows)

    killed = Run(tmp_path / "killed", model)
    # Between the step and its commit: the batch is leased, the weights are changed, nothing says so.
    code, text = killed.train(lambda method, path, committed: path == "/commit" and committed == 4)
    assert code == -signal.SIGKILL, text
    saved = all_checkpoints(killed.output)
    assert saved, text

    # While waiting for the next batch, after a resume. The newest checkpoint is then damaged as a crash of the machine
    # would: its data are cut off.
    def once_saved(method: str, path: str, committed: int) -> bool:
        if path == "/commit" and committed == 4:
            killed.wait_for_writer(4)
        return path == "/lease" and committed == 5

    code, text = killed.train(once_saved)
    assert code == -signal.SIGKILL, text
    assert f"going on after update {int(saved[0].name[-6:])} from {saved[0]}" in text
    newest, older = all_checkpoints(killed.output)
    assert older == saved[0]
    data = max(newest.glob("*.distcp"), key=lambda p: p.stat().st_size)
    os.truncate(data, data.stat().st_size - 100)
    code, text = killed.train()
    assert code == 0, text
    assert f"skipped checkpoint {newest}: {data.name} has " in text
    assert f"going on after update 2 from {older}" in text
    assert newest.with_name("update-000004.abandoned-1").is_dir()
    assert killed.rows() == rows
    assert killed.weights() == whole.weights()

    # The same command once more: nothing is left to do, and nothing is done.
    before = killed.metrics.read_bytes()
    code, text = killed.train()
    assert code == 0, text
    assert "going on after update 6" in text
    assert killed.metrics.read_bytes() == before

    code, text = killed.train(None, "train.batch_size=8")
    assert code == 1
    (error,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert "is of another run (train.batch_size: 4 then, 8 now)" in error
    assert json.loads((all_checkpoints(killed.output)[0] / "run.json").read_text())["update"] == 6


def test_after_a_kill_a_run_with_groups_uses_every_prompt_exactly_once(tmp_path: Path, model: Path) -> None:
    run = Run(tmp_path / "grpo", model, {"name": "grpo", "group_size": 2})
    code, text = run.train(lambda method, path, committed: path == "/commit" and committed == 4)
    assert code == -signal.SIGKILL, text
    assert all_checkpoints(run.output), text
    code, text = run.train()
    assert code == 0, text
    assert "going on after update" in text
    used = [pair for update in range(6) for pair in run.used[update]]
    assert len(used) == 6 * 4
    assert set(Counter(group for _, group in used).values()) == {2}
    assert len(set(used)) == 6 * 2
    cursor = PromptCursor(PROMPTS, run.config.seed, run.config.data.shuffle)
    assert {prompt for prompt, _ in used} == {next(cursor).id for _ in range(6 * 2)}  # synchronous: the first twelve
