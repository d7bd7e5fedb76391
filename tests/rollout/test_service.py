"""The whole service over real HTTP: real engine, agent and reward; the trainer is this test."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import yaml

from megatron_fr.agents.arithmetic import questions
from megatron_fr.errors import RolloutEnded
from megatron_fr.runtime.access import TOKEN_FILE, bearer, read_token
from megatron_fr.runtime.spawn import tied_to_us
from megatron_fr.trainer.data.client import Lease, RolloutClient
from megatron_fr.trajectory import ModelLimits, Trajectory
from tests.support.hf_reference import forward, next_logprobs
from tests.support.processes import command_of, family_of, wait_gone
from tools.tiny.model import VOCAB_SIZE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BATCH, LAG = 8, 1


class Service:
    def __init__(self, process: subprocess.Popen[str], url: str, token: str, models: list[Path], log: Path) -> None:
        self.process = process
        self.client = RolloutClient(url, token)
        self.headers = bearer(token)
        self.models = models
        self.log = log
        self.version = 0
        self.consumed = 0

    def lease(self) -> Lease:
        deadline = time.monotonic() + 60
        while (lease := self.client.lease(self.version, wait_s=2.0)) is None:
            assert time.monotonic() < deadline, self.client.status()
        return lease

    def fetch(self, lease: Lease) -> list[Trajectory]:
        return self.client.fetch([item.id for item in lease.items])

    def drain(self) -> None:
        """Consume what is left, until the service ends the run."""
        for _ in range(20):
            lease = self.client.lease(self.version, wait_s=5.0)
            if lease is not None:
                self.commit(lease)

    def wait_for_the_gate(self) -> dict[str, Any]:
        """The status once everything that the gate lets in has finished."""
        deadline = time.monotonic() + 60
        limit = (self.consumed + LAG + 1) * BATCH
        while True:
            status = self.client.status()
            live = status["started"] - status["failed"] - status["dropped"]
            assert live <= limit, status
            if live == limit and not status["in_flight"]:
                return status
            assert time.monotonic() < deadline, status
            time.sleep(0.05)

    def update(self, lease: Lease) -> None:
        """Load other weights into the engine as a trainer does, then commit."""
        self.version += 1
        engine = self.client.status()["engines"][0]
        body = {
            "model_path": str(self.models[self.version % 2]),
            "weight_version": str(self.version),
            "flush_cache": False,
        }
        for path, content in (
            ("/pause_generation", {"mode": "in_place"}),
            ("/update_weights_from_disk", body),
            ("/continue_generation", {}),
        ):
            assert httpx.post(engine + path, json=content, headers=self.headers, timeout=60).status_code == 200
        self.commit(lease)

    def commit(self, lease: Lease, *, stepped: bool = True) -> None:
        self.client.commit(lease.batch_id, version=self.version, stepped=stepped)
        self.consumed += 1


@pytest.fixture(scope="module")
def config(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("service")
    for name, held_out in (("train", False), ("eval", True)):
        lines = [json.dumps(q.record()) for q in itertools.islice(questions(0, held_out=held_out), 40)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    config: dict[str, Any] = {
        "device": "cpu",
        "output": str(folder / "run"),
        "model": {"path": str(models[0]), "dtype": "float32"},
        "train": {"num_updates": 4, "batch_size": BATCH},
        "rollout": {"max_concurrent_trajectories": 12, "max_context": 512, "max_new_tokens": 64, "max_policy_lag": LAG},
        "agent": {"kind": "python_tool", "max_turns": 3, "tool": {"sandbox": "none"}},
        "reward": {"function": "megatron_fr.agents.arithmetic:exact_answer"},
        "data": {"train": str(folder / "train.jsonl")},
        "evaluation": {
            "samples": 2,
            "sets": {
                "easy": {"data": str(folder / "eval.jsonl"), "num_prompts": 5},
                "greedy": {"data": str(folder / "eval.jsonl"), "num_prompts": 2, "samples": 1, "temperature": 0},
            },
        },
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder / "run.yaml"


def launch(config: Path, url_file: Path, log: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megatron_fr.rollout", "--config", str(config), "--url-file", str(url_file)]
    with log.open("w") as out:
        return subprocess.Popen(
            ["prlimit", "--nofile=1024:4096", *tied_to_us([*command, "rollout.start_timeout_s=200"])],
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )


@pytest.fixture(scope="module")
def service(config: Path, models: list[Path]) -> Iterator[Service]:
    url_file, log = config.with_name("url"), config.with_name("service.log")
    process = launch(config, url_file, log)
    try:
        deadline = time.monotonic() + 240
        while not url_file.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        token = read_token(config.parent / "run")
        yield Service(process, url_file.read_text().strip(), token, models, log)
    finally:
        process.kill()
        process.wait()


def test_a_batch_can_be_leased_fetched_and_committed(service: Service, models: list[Path]) -> None:
    lease = service.lease()
    assert len(lease.items) == BATCH
    again = service.lease()
    assert (again.batch_id, again.items) == (lease.batch_id, lease.items)
    trajectories = service.fetch(lease)
    limits = ModelLimits(vocab_size=VOCAB_SIZE, max_context=512, num_moe_layers=2, top_k=2, num_experts=8)
    for item, trajectory in zip(lease.items, trajectories, strict=True):
        trajectory.validate(limits)
        assert (item.id, item.num_tokens, item.num_action_tokens) == (
            trajectory.id,
            len(trajectory),
            trajectory.num_action_tokens,
        )
        assert item.lag == 0
        assert item.metadata.keys() == {"intermediate"}
        assert item.metadata == trajectory.metadata
        assert item.reward_parts == trajectory.reward_parts
        assert trajectory.num_action_tokens <= 64
        tokens = trajectory.tokens.tolist()
        logprobs, routes, _ = forward(models[0], tokens)
        acted = trajectory.action_mask[1:]
        np.testing.assert_allclose(
            trajectory.behavior_logprobs[1:][acted], next_logprobs(logprobs, tokens[1:])[acted], atol=1e-4
        )
        np.testing.assert_array_equal(trajectory.routed_experts, routes[:-1])
    assert lease.metrics["reward/mean"] == pytest.approx(np.mean([t.reward for t in trajectories]))
    assert lease.metrics["trajectory/action_tokens_mean"] == np.mean([t.num_action_tokens for t in trajectories])
    assert lease.metrics["rollout/tokens_per_s"] > 0
    assert lease.metrics["rollout/routes_missing"] == 0
    shares = [lease.metrics[f"rollout/time_{name}"] for name in ("queued", "generating", "tools")]
    assert sum(shares) == pytest.approx(1.0)
    service.commit(lease, stepped=False)


def test_the_gate_closes_until_the_trainer_commits(service: Service) -> None:
    status = service.wait_for_the_gate()
    time.sleep(0.5)
    assert service.client.status() == status
    assert (status["queued"], status["in_flight"], status["version"]) == (2 * BATCH, 0, 0)


def test_updates_go_on_with_rollouts_and_no_trajectory_is_older_than_the_bound(service: Service) -> None:
    seen: set[str] = set()
    lags: set[int] = set()
    for _ in range(6):
        lease = service.lease()
        assert max(item.lag for item in lease.items) <= LAG
        for item, trajectory in zip(lease.items, service.fetch(lease), strict=True):
            assert item.lag == service.version - trajectory.oldest_version
            assert trajectory.versions.max() <= service.version
            assert trajectory.routed_experts is not None, trajectory.route_error
        lags |= {item.lag for item in lease.items}
        assert not seen & {item.id for item in lease.items}
        seen |= {item.id for item in lease.items}
        service.update(lease)
        status = service.client.status()
        assert status["version"] == service.version
        assert status["started"] - status["failed"] - status["dropped"] <= (service.consumed + LAG + 1) * BATCH
    assert 1 in lags


def test_a_probe_is_fresh_and_carries_the_engines_version(service: Service) -> None:
    engine = service.client.status()["engines"][0]
    trajectory = service.client.probe(engine, max_tokens=12, timeout_s=60)
    assert trajectory.num_action_tokens == 12
    assert set(trajectory.versions[trajectory.action_mask]) == {service.version}
    tokens = trajectory.tokens.tolist()
    logprobs, _, _ = forward(service.models[service.version % 2], tokens)
    acted = trajectory.action_mask[1:]
    np.testing.assert_allclose(
        trajectory.behavior_logprobs[1:][acted], next_logprobs(logprobs, tokens[1:])[acted], atol=1e-4
    )


def test_the_held_out_evaluation_stays_outside_gate_and_queue(service: Service) -> None:
    before = service.wait_for_the_gate()
    answer = httpx.post(f"{service.client.url}/evaluate", json={"name": "start"}, headers=service.headers, timeout=120)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["num_trajectories"] == 12
    for name in ("easy", "greedy"):
        metrics = {k.removeprefix(f"{name}/"): v for k, v in body["metrics"].items() if k.startswith(f"{name}/")}
        assert 0 <= metrics["reward/mean"] <= metrics["reward/pass"] <= 1
        assert {"tools/calls", "trajectory/truncated", "trajectory/action_tokens_mean", "reward/answered"} <= set(
            metrics
        )
    after = service.client.status()
    assert (after["started"], after["queued"]) == (before["started"], before["queued"])
    assert after["tokens_generated"] > before["tokens_generated"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "reason"),
    [
        ("POST", "/lease", {"version": "1"}, 400, "version='1'"),
        ("POST", "/commit", {"batch_id": "x", "version": 1, "stepped": True}, 410, "commit of 'x'"),
        ("GET", "/trajectories?ids=nope", None, 404, "nope"),
        ("POST", "/probe", {"engine": "http://elsewhere", "max_tokens": 1}, 410, "there is no engine"),
        ("GET", "/nowhere", None, 404, "/nowhere"),
        ("POST", "/lease", {"version": 0, "wait_s": 61}, 400, "wait_s=61, expected 0 to 60"),
        ("POST", "/lease", {"version": 10**30, "wait_s": 1}, 400, "commit the batch before first"),
    ],
)
def test_a_request_that_makes_no_sense_gets_one_clear_error(
    service: Service, method: str, path: str, body: Any, status: int, reason: str
) -> None:
    answer = httpx.request(method, service.client.url + path, json=body, headers=service.headers)
    assert answer.status_code == status
    assert reason in answer.json()["error"]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"[" * 60_000, "application/json"),
        (b"{}", "application/json; charset=nonsense"),
        (b'{"version": 0, "wait_s": 1e999}', "application/json"),
        (b'{"version": 0, "wait_s": NaN}', "application/json"),
        (b'{"version": 1' + b"0" * 5000 + b"}", "application/json"),
        (b" " * 200_000, "application/json"),
    ],
    ids=["nesting", "charset", "overflow", "NaN", "digits", "size"],
)
def test_a_malformed_body_is_the_clients_fault(service: Service, content: bytes, kind: str) -> None:
    headers = {**service.headers, "Content-Type": kind}
    answer = httpx.post(f"{service.client.url}/lease", content=content, headers=headers)
    assert answer.status_code in (400, 413), answer.text
    assert answer.json()["error"]


def test_nobody_without_the_token_is_answered(service: Service, config: Path) -> None:
    secret = config.parent / "run" / TOKEN_FILE
    assert secret.stat().st_mode & 0o777 == 0o600
    for headers in ({}, bearer("x" * 64)):
        answer = httpx.get(f"{service.client.url}/status", headers=headers)
        assert answer.status_code == 401
        assert TOKEN_FILE in answer.json()["error"]
        engine = service.client.status()["engines"][0]
        for path in ("/generate", "/pause_generation", "/update_weights_from_disk", "/flush_cache"):
            assert httpx.post(engine + path, json={}, headers=headers).status_code == 401, path
    for process in family_of(service.process.pid):
        assert read_token(secret.parent) not in command_of(process)


def test_service_and_engines_may_open_as_many_files_as_the_machine_lets_them(service: Service) -> None:
    engines = [p for p in family_of(service.process.pid) if "sglang.launch_server" in command_of(p)]
    assert engines
    for process in (psutil.Process(service.process.pid), *engines):
        assert process.rlimit(psutil.RLIMIT_NOFILE) == (4096, 4096)


def test_what_the_service_writes_is_its_users_alone(service: Service, config: Path) -> None:
    written = list((config.parent / "run").rglob("*"))
    assert written
    assert [path for path in written if path.stat().st_mode & 0o077] == []


def test_a_killed_engine_ends_the_run_with_its_signal_and_then_the_service_ends_cleanly(service: Service) -> None:
    family = family_of(service.process.pid)
    servers = [p for p in family if "sglang.launch_server" in command_of(p) and p.ppid() == service.process.pid]
    (server,) = servers
    server.send_signal(signal.SIGKILL)
    with pytest.raises(RolloutEnded, match=r"engine 0 .*died: signal SIGKILL"):
        service.drain()
    with pytest.raises(RolloutEnded, match=r"died: signal SIGKILL"):
        service.client.evaluate("after")
    started = time.monotonic()
    service.process.send_signal(signal.SIGTERM)
    service.process.wait(timeout=5)
    assert time.monotonic() - started < 5
    assert not wait_gone(family, 1.0)


def test_a_signal_while_the_engines_start_ends_everything_at_once(config: Path, tmp_path: Path) -> None:
    process = launch(config, tmp_path / "url", tmp_path / "log")
    try:
        deadline = time.monotonic() + 60
        while not any("launch_server" in command_of(p) for p in family_of(process.pid)[1:]):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(2.0)  # SGLang is importing, and may have children of its own
        family = family_of(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=5) == 0
        assert not wait_gone(family, 1.0)
        assert "Traceback" not in (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
