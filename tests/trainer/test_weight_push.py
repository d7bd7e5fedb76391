"""The probe of fresh tokens: the first sync waits for it, later it is compared before the next step, on every rank."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fr.config import RunConfig
from megatron_fr.errors import RequestFailed, SyncError
from megatron_fr.trajectory import NO_VERSION, Trajectory
from tests.support.parallel_launch import run_ranks
from tools.tiny import make_untrained

GENERATE_S = 0.6


class Willing(BaseHTTPRequestHandler):
    """An engine that agrees to everything; the transport of these tests sends it nothing."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"success": true}')

    def log_message(self, *_: Any) -> None:
        pass


class Service:
    """The rollout service's answers: fresh tokens whose log-probabilities are off by what ``errors`` says next."""

    token = "token"

    def __init__(self, engine: str, fresh: Trajectory) -> None:
        self.engine, self.fresh = engine, fresh
        self.errors: list[float | None] = []
        self.asked = 0

    def status(self) -> dict[str, Any]:
        return {"engines": [self.engine]}

    def probe(self, engine: str, *, max_tokens: int, timeout_s: float) -> Trajectory:
        assert (engine, max_tokens) == (self.engine, 8)
        self.asked += 1
        time.sleep(GENERATE_S)
        error = self.errors.pop(0)
        if error is None:
            raise RequestFailed("nobody answers")
        shifted = np.where(self.fresh.action_mask, self.fresh.behavior_logprobs - error, 0).astype(np.float32)
        return Trajectory(**{**vars(self.fresh), "behavior_logprobs": shifted})


def fresh_tokens(folder: Path) -> Trajectory:
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(20, 40)[None]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(tokens).logits[0]
    logprobs = logits.log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0].numpy()
    mask = np.arange(20) >= 12
    return Trajectory(
        id="probe",
        prompt_id="p",
        group_id="probe",
        tokens=tokens[0].numpy().astype(np.int32),
        action_mask=mask,
        behavior_logprobs=np.where(mask, np.concatenate([[0], logprobs]), 0).astype(np.float32),
        versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
        reward=0.0,
        routed_experts=None,
    )


def observe_probes(folder: Path) -> dict[str, Any]:
    """One sync after another with real ranks and weights, until a probe fails."""
    from megatron_fr.runtime.device import resolve_device
    from megatron_fr.trainer import distributed
    from megatron_fr.trainer.data.loader import BatchLoader
    from megatron_fr.trainer.policy import build_policy
    from megatron_fr.trainer.weight_push import WeightSync

    server = ThreadingHTTPServer(("127.0.0.1", 0), Willing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = RunConfig.model_validate(
        {
            "output": folder / "out",
            "model": {"path": str(folder), "dtype": "float32"},
            "parallel": {"world_size": 2, "tp": 2},
            "train": {"num_updates": 1, "batch_size": 8},
            "reward": {"function": "unused:unused"},
            "data": {"train": "unused.jsonl"},
            "sync": {
                "transport": "tests.support.transports:Draining",
                "verify": False,
                "probe_tokens": 8,
                "timeout_s": 20,
            },
        }
    )
    device = resolve_device("cpu")
    distributed.initialize(config.parallel, device, seed=1, timeout_s=60)
    policy = build_policy(config, device)
    service: Any = Service(f"http://127.0.0.1:{server.server_port}", fresh_tokens(folder))
    loader = BatchLoader(config, policy, service, device.torch_device)
    sync = WeightSync(config, device, policy, loader, service, "127.0.0.1")
    seen: dict[str, Any] = {}

    service.errors = [0.0]
    seen["first"] = sync.push(0)
    seen["nothing pending"] = sync.finish_probe()

    service.errors = [0.0]
    started = time.monotonic()
    seen["later"] = sync.push(1)
    seen["push_s"] = time.monotonic() - started
    try:
        sync.push(2)
    except RuntimeError as error:
        seen["forgotten"] = str(error)
    time.sleep(GENERATE_S)  # the next batch is waited for
    seen["probe"] = sync.finish_probe()

    service.errors = [0.5, 0.01]
    sync.push(2)
    seen["by chance"] = sync.finish_probe()

    for name, errors in (("differs", [0.5, 0.4]), ("silent", [None])):
        service.errors = list(errors)
        sync.push(3)
        try:
            sync.finish_probe()
        except SyncError as error:
            seen[name] = str(error)
    seen["asked"] = service.asked
    sync.close()
    server.shutdown()
    return seen


@pytest.mark.slow
def test_later_probes_hold_up_nothing_and_end_the_run_on_every_rank(tmp_path: Path) -> None:
    folder = make_untrained(tmp_path / "qwen3", family="qwen3")
    answers = run_ranks(observe_probes, 2, folder=folder)
    for seen in answers:
        assert seen["first"]["sync/probe_version"] == 0
        assert seen["first"]["sync/probe_logprob_diff"] < 1e-4
        assert seen["first"]["time/probe"] >= GENERATE_S
        assert seen["nothing pending"] == {}
        assert set(seen["later"]) == {"sync/seconds", "sync/verify_s", "sync/bytes"}
        assert seen["push_s"] < GENERATE_S
        assert "call finish_probe before the optimizer step" in seen["forgotten"]
        assert seen["probe"]["sync/probe_version"] == 1
        assert seen["probe"]["sync/probe_logprob_diff"] < 1e-4
        assert seen["probe"]["time/probe"] < GENERATE_S
        # One sample that differs is followed by another.
        assert abs(seen["by chance"]["sync/probe_logprob_diff"] - 0.01) < 1e-4
        assert "after the sync to version 3, engine http://127.0.0.1" in seen["differs"]
        assert (
            "differ by 0.4 in mean |log-probability| of 8 tokens, above sync.max_probe_difference=0.1"
            in (seen["differs"])
        )
        assert "after the sync to version 3: nobody answers; see the engine's log in" in seen["silent"]
    assert [seen["asked"] for seen in answers] == [7, 0]  # rank 0 alone asks
