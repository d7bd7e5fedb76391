"""Small parts of the rollout side: plugin, load sharing, event loop delay, limits, command line."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pkgutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
import torch
from transformers import Qwen3MoeConfig

from megatron_fr.config import RunConfig
from megatron_fr.engines import cpu_platform as sglang_cpu
from megatron_fr.engines.client import EngineClient
from megatron_fr.engines.engine import EngineSpec
from megatron_fr.engines.fleet import Fleet
from megatron_fr.errors import EngineError, ModelError
from megatron_fr.hf.folder import read_spec
from megatron_fr.models.registry import model_spec
from megatron_fr.rollout.service import engine_specs, load_tokenizer, model_limits
from megatron_fr.rollout.watchdog import EventLoopDelay
from megatron_fr.runtime.device import resolve_device
from megatron_fr.trajectory import ModelLimits
from tools.tiny import make_untrained
from tools.tiny.tokenizer import make_tokenizer

ROOT = Path(__file__).resolve().parents[2]


def test_the_plugin_stays_out_of_the_way_unless_it_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert sglang_cpu.platform() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "another")
    assert sglang_cpu.platform() is None


def test_the_plugin_stays_out_of_the_way_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", sglang_cpu.PLATFORM_NAME)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert sglang_cpu.platform() is None


def test_the_selected_plugin_names_a_platform_class_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.platforms.interface import SRTPlatform

    monkeypatch.setenv("SGLANG_PLATFORM", sglang_cpu.PLATFORM_NAME)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for package in ("flash_mla", "flashinfer"):
        monkeypatch.setitem(sys.modules, package, None)  # as it will be; put back after the test
    platform = pkgutil.resolve_name(sglang_cpu.platform())()
    assert isinstance(platform, SRTPlatform)
    assert platform.is_out_of_tree()
    assert (platform.device_type, platform.get_default_attention_backend()) == ("cpu", "torch_native")
    free, total = platform.get_available_memory()
    assert 0 < free < total == platform.get_device_total_memory()


def test_trajectories_go_to_the_engine_with_the_fewest(spec: Callable[..., EngineSpec], limits: ModelLimits) -> None:
    async def run() -> None:
        fleet = Fleet([], limits, temperature=1.0, request_timeout_s=1)
        async with aiohttp.ClientSession() as http:
            fleet.clients = [EngineClient(u, http, limits=limits, temperature=1.0, timeout_s=1) for u in ("a", "b")]
            with fleet.borrow() as first, fleet.borrow() as second:
                assert {first.url, second.url} == {"a", "b"}
                with fleet.borrow() as third:
                    assert third.url == "a"
                    with fleet.borrow() as fourth:
                        assert fourth.url == "b"
            with pytest.raises(RuntimeError), fleet.borrow() as failing:
                raise RuntimeError
            with fleet.borrow() as again:
                assert again is failing is first
            fleet.set_version(3)
            fleet.set_version(2)
            assert [c.version for c in fleet.clients] == [3, 3]
            with pytest.raises(EngineError, match=r"there is no engine 'c'; the engines are a, b"):
                fleet.client("c")

    asyncio.run(run())


@pytest.mark.parametrize(("runners", "held_out", "slots"), [(400, None, 204), (400, "eval.jsonl", 404), (8, None, 64)])
def test_an_engine_has_slots_for_the_evaluation_and_the_probe_beside_the_runners(
    runners: int, held_out: str | None, slots: int
) -> None:
    config = RunConfig.model_validate(
        {
            "model": {"path": "unused"},
            "train": {"num_updates": 1},
            "rollout": {"engines": 2, "max_concurrent_trajectories": runners},
            "reward": {"function": "unused:unused"},
            "data": {"train": "unused.jsonl", "eval": held_out},
        }
    )
    specs = engine_specs(config, resolve_device("cpu"), want_routes=True)
    assert [spec.max_running for spec in specs] == [slots] * 2


def test_a_blocked_event_loop_is_measured() -> None:
    async def run() -> float:
        delay = EventLoopDelay()
        task = asyncio.create_task(delay.run())
        await asyncio.sleep(0.06)
        delay.take_worst_ms()
        time.sleep(0.3)
        await asyncio.sleep(0.1)
        task.cancel()
        worst = delay.take_worst_ms()
        assert delay.take_worst_ms() == 0
        return worst

    assert 200 < asyncio.run(run()) < 1000


def test_limits_are_read_from_the_model(models: list[Path], tmp_path: Path) -> None:
    limits = model_limits(read_spec(models[0]), 77)
    assert (limits.max_context, limits.num_moe_layers, limits.top_k, limits.num_experts) == (77, 2, 2, 8)
    dense = model_limits(read_spec(make_untrained(tmp_path / "dense", dense=True)), 77)
    assert (dense.num_moe_layers, dense.top_k, dense.num_experts) == (0, 0, 0)
    mixed = Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=4, decoder_sparse_step=2)
    with pytest.raises(ModelError, match="only some of its layers have experts"):
        model_limits(model_spec(mixed), 77)


@pytest.mark.slow
def test_a_run_that_cannot_start_says_why_before_any_engine_starts(models: list[Path], tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"""
        device: cpu
        output: {tmp_path}/run
        model: {{path: {models[0]}, dtype: float32}}
        train: {{num_updates: 1, batch_size: 2}}
        rollout: {{max_context: 256, max_new_tokens: 32}}
        reward: {{function: "megatron_fr.agents.arithmetic:exact_answer"}}
        data: {{train: {tmp_path}/missing.jsonl}}
        """
    )
    ended = subprocess.run(
        [sys.executable, "-m", "megatron_fr.rollout", "--config", str(config), "--url-file", str(tmp_path / "url")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 1
    assert "error: prompts" in ended.stderr
    assert "missing.jsonl" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "url").exists()
    assert not (tmp_path / "run" / "logs").exists()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    folder = make_untrained(tmp_path / "model")
    tokenizer = load_tokenizer(str(folder), read_spec(folder).vocab)
    largest = max(tokenizer.get_vocab().values())
    with pytest.raises(ModelError, match=rf"tokenizer has token {largest}, its model a vocabulary of {largest};"):
        load_tokenizer(str(folder), largest)


def test_code_that_comes_with_a_tokenizer_is_not_run_even_where_a_terminal_would_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mark = tmp_path / "model", tmp_path / "ran"
    make_tokenizer().save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    code = f"open({str(mark)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast as Mine\n"
    (folder / "mine.py").write_text(code)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(ModelError, match=r"has no usable tokenizer: .*custom code"):
        load_tokenizer(str(folder), 10**6)
    assert not mark.exists()


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = make_untrained(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no usable tokenizer: no tokenizer\.json; fetch"):
        load_tokenizer(str(folder), 10**6)
