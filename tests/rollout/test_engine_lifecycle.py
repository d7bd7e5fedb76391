"""How engines start, fail to start, and end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_fr.engines.engine import Engine, EngineSpec, server_args
from megatron_fr.engines.fleet import Fleet
from megatron_fr.errors import ConfigError, EngineError
from megatron_fr.runtime.ports import lease_free_port, lease_port
from megatron_fr.runtime.spawn import tied_to_us
from megatron_fr.trajectory import ModelLimits
from tests.support.processes import alive, family_of, wait_gone

Spec = Callable[..., EngineSpec]
ROOT = Path(__file__).resolve().parents[2]


def values_of(words: list[str], name: str) -> list[str]:
    return [words[i + 1] for i, word in enumerate(words) if word == name]


def test_a_port_in_use_is_refused_before_anything_starts(spec: Spec) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        engine = Engine(spec(port=port))
        with pytest.raises(EngineError, match=rf"rollout.engine_port={port}: port {port} on 127.0.0.1 is already"):
            asyncio.run(engine.start())
    assert engine.pid is None
    assert not engine.spec.log_path.exists()


def test_two_runs_never_get_the_same_port() -> None:
    leases = [lease_free_port("127.0.0.1") for _ in range(50)]
    try:
        assert len({lease.port for lease in leases}) == 50
        # Another process respects a lease although nothing listens on the port yet.
        code = f"from megatron_fr.runtime.ports import lease_port; lease_port('127.0.0.1', {leases[0].port}, 'x=1')"
        other = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert f"port {leases[0].port} on 127.0.0.1 is already in use" in other.stderr
    finally:
        for lease in leases:
            lease.release()
    lease_port("127.0.0.1", leases[0].port, "x=1").release()


def test_arguments_of_the_configuration_win_over_the_defaults(spec: Spec) -> None:
    words = server_args(
        spec(args={"max_total_tokens": 777, "--enable-return-routed-experts": False, "log-requests": True}), 1, 2
    )
    assert values_of(words, "--max-total-tokens") == ["777"]
    assert "--enable-return-routed-experts" not in words
    assert "--log-requests" in words
    assert (values_of(words, "--port"), values_of(words, "--nccl-port")) == (["1"], ["2"])


def test_an_argument_that_another_field_decides_is_refused(spec: Spec) -> None:
    with pytest.raises(ConfigError, match=r"rollout.engine_args.tp_size=2: rollout.engine_tp decides this"):
        server_args(spec(args={"tp_size": 2}), 1, 2)


def test_gpu_engines_do_not_get_the_cpu_arguments(spec: Spec) -> None:
    words = server_args(spec(device="cuda", index=3, tensor=2, dtype="bfloat16"), 1, 2)
    assert values_of(words, "--base-gpu-id") == ["6"]
    assert "--attention-backend" not in words
    assert "--max-total-tokens" not in words


@pytest.mark.slow
def test_an_engine_that_dies_while_starting_says_why_and_takes_its_neighbours_along(
    spec: Spec, limits: ModelLimits
) -> None:
    fleet = Fleet(
        [spec(index=0, args={"no-such-argument": 1}), spec(index=1)], limits, temperature=1.0, request_timeout_s=10
    )
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(EngineError, match=r"engine 0 .*died while starting: exit code 2") as caught:
        asyncio.run(fleet.start())
    assert "no-such-argument" in str(caught.value)
    assert not [p for p in set(psutil.Process().children(recursive=True)) - before if alive(p)]


@pytest.mark.slow
def test_a_start_that_takes_too_long_is_ended(spec: Spec) -> None:
    engine = Engine(spec(start_timeout_s=1.0))
    with pytest.raises(EngineError, match=r"was not ready after rollout.start_timeout_s=1"):
        asyncio.run(engine.start())
    assert engine.pid is None


@pytest.mark.slow
def test_an_engine_without_routes_is_found_by_the_probe_and_dies_with_its_owner(spec: Spec, tmp_path: Path) -> None:
    engine = spec(args={"enable-return-routed-experts": False})
    script = tmp_path / "owner.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import asyncio, json, time
            from pathlib import Path
            import aiohttp
            from megatron_fr.errors import EngineError
            from megatron_fr.engines.client import EngineClient
            from megatron_fr.engines.engine import Engine, EngineSpec
            from megatron_fr.engines.probe import probe_engine
            from tools.tiny.model import VOCAB_SIZE
            from megatron_fr.trajectory import ModelLimits

            async def main():
                limits = ModelLimits(vocab_size=VOCAB_SIZE, max_context=1024, num_moe_layers=2, top_k=2, num_experts=8)
                engine = Engine(EngineSpec(model_path={engine.model_path!r}, log_path=Path({str(engine.log_path)!r}),
                                           device="cpu", dtype="float32", max_context=1024, args={engine.args!r}))
                await engine.start()
                async with aiohttp.ClientSession() as http:
                    client = EngineClient(engine.url, http, limits=limits, temperature=1.0, timeout_s=30)
                    await probe_engine(client, limits, want_routes=False)
                    try:
                        await probe_engine(client, limits, want_routes=True)
                        said = None
                    except EngineError as error:
                        said = str(error)
                print(json.dumps({{"pid": engine.pid, "said": said}}), flush=True)
                time.sleep(600)

            asyncio.run(main())
            """
        )
    )
    owner = subprocess.Popen(
        tied_to_us([sys.executable, str(script)]),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        report = json.loads(owner.stdout.readline())
        assert "the engine returned no routes" in report["said"]
        assert "train.routing_replay" in report["said"]
        assert "enable-return-routed-experts" in report["said"]
        family = family_of(report["pid"])
        assert len(family) > 1
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert not wait_gone(family, 5.0)


def test_an_engines_sockets_and_its_input_are_closed_to_others(engine: Engine) -> None:
    environment = psutil.Process(engine.pid).environ()
    folder = Path(environment["TMPDIR"])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(str(folder)) < 90  # a socket's path ends at 107 characters
    assert os.readlink(f"/proc/{engine.pid}/fd/0") == "/dev/null"


def test_the_token_in_an_engines_log_is_in_no_message(spec: Spec, tmp_path: Path) -> None:
    engine = Engine(spec(log_path=tmp_path / "log", token="secret"))
    (tmp_path / "log").write_text("server_args=ServerArgs(api_key='secret')\n")
    assert engine.last_line() == "server_args=ServerArgs(api_key='[token]')"
