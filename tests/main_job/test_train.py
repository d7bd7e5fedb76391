"""The main job as a user starts it: real engines, real Megatron-Core ranks, one command."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_fr.observe.catalogue import find_metric
from megatron_fr.observe.failures import read_failures
from tests.support.hanging_agent import HANGS, RAISES
from tests.support.processes import command_of, family_of, wait_gone
from tests.support.train_command import arguments, finish, interrupt, running, wait_for

REWARD = "reward.function=tests.support.varied_reward:by_length"
ONE = ("rollout.engines=1",)  # where a second one would add nothing


def rows(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def command(policy: Path, output: Path, *overrides: str) -> list[str]:
    return arguments(policy, output, REWARD, *overrides)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("tp2", ["parallel.world_size=2", "parallel.tp=2"]),
        pytest.param(
            "grpo_ep2",
            [
                *("algorithm=grpo", "algorithm.group_size=4", "algorithm.steps=2", "rollout.max_policy_lag=1"),
                *("parallel={world_size: 2, ep: 2}", *ONE),
            ],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_run_trains_syncs_and_leaves_what_it_promises(
    policy: Path, tmp_path: Path, name: str, overrides: list[str]
) -> None:
    output = tmp_path / name
    status, text = finish(command(policy, output, "train.num_updates=3", *overrides), tmp_path / "log")
    assert status == 0, text
    found = rows(output)
    assert [row["update"] for row in found] == [0, 1, 2, 3]
    assert found[0]["sync/verify_s"] > 0  # the first sync checks every parameter of every engine
    assert all(find_metric(metric) for row in found for metric in row)
    trained = [row for row in found if row.get("train/stepped")]
    assert trained, text
    assert found[-1]["version"] == len(trained)
    # Engine and trainer agree about fresh tokens: those of the first sync, and each version's before the next step.
    probes = [row["sync/probe_logprob_diff"] for row in found if "sync/probe_logprob_diff" in row]
    assert len(probes) == 1 + sum(bool(row.get("train/stepped")) for row in found[:-1])
    assert max(probes) < 1e-3
    for row in trained:
        # Weights a few updates older choose other experts here and there: the more, the less a router was trained.
        assert row["policy/route_agreement"] > (0.99 if row["policy_lag/max"] == 0 else 0.7)
        assert row["sync/bytes"] > 1e6
        assert 0 <= row["policy_lag/max"] <= (1 if name.startswith("grpo") else 4)
        assert (row["sync/verify_s"] > 0) == (name == "tp2")  # two engines are compared at every sync
    for promised in ("metrics.jsonl", "tensorboard", "run.png", "config.yaml", "logs"):
        assert (output / promised).exists(), promised
    folder = Path(text.split("model: ")[-1].split("\n")[0]) if "model: " in text else newest_model(output)
    assert_loads_and_has_moved(folder, policy)


def newest_model(output: Path) -> Path:
    """The last Hugging Face folder of a run."""
    return max((p.parent for p in output.glob("**/model*.safetensors")), key=lambda p: p.stat().st_mtime)


def assert_loads_and_has_moved(folder: Path, source: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained, start = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (folder, source))
    before = dict(start.named_parameters())
    moved = [name for name, value in trained.named_parameters() if not torch.equal(value, before[name])]
    assert any("gate" in name for name in moved)  # routers learn under replay
    assert len(moved) > len(before) / 2
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(source).chat_template


@pytest.mark.slow
def test_ctrl_c_ends_every_process_within_ten_seconds_and_leaves_a_model(policy: Path, tmp_path: Path) -> None:
    output, log = tmp_path / "run", tmp_path / "log"
    with running(command(policy, output, "train.num_updates=1000"), log) as process:
        wait_for("update    2/1000", log, process)
        family = family_of(process.pid)
        assert len(family) > 4  # service, engine, its scheduler, trainer
        started = time.monotonic()
        interrupt(process)
        # What holds memory and devices goes first; the command itself then draws the closing report.
        wait_gone(family[1:], 20)
        took = time.monotonic() - started
        assert process.wait(20) == 130, log.read_text()
        assert not wait_gone(family, 0)
    assert took < 10, f"took {took:.1f} s"
    assert_loads_and_has_moved(newest_model(output), policy)


@pytest.mark.slow
def test_an_engine_killed_mid_run_ends_it_with_the_reason_and_keeps_the_weights(policy: Path, tmp_path: Path) -> None:
    output, log = tmp_path / "run", tmp_path / "log"
    with running(command(policy, output, "train.num_updates=1000", *ONE), log) as process:
        wait_for("update    3/1000", log, process)
        family = family_of(process.pid)
        engine = next(p for p in family if "sglang.launch_server" in command_of(p))
        engine.kill()
        assert process.wait(60) == 1, log.read_text()
        assert not wait_gone(family, 0)
    text = log.read_text()
    assert "SIGKILL" in text
    assert "saved the weights of update" in text
    assert_loads_and_has_moved(newest_model(output), policy)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_reward_function_that_raises_ends_the_run_with_its_name_and_its_error(policy: Path, tmp_path: Path) -> None:
    overrides = ("reward.function=tests.support.varied_reward:broken", "train.num_updates=3", *ONE)
    broken = command(policy, tmp_path / "run", *overrides)
    status, text = finish(broken, tmp_path / "log")
    assert status == 1
    assert "reward.function='tests.support.varied_reward:broken'" in text
    assert "KeyError" in text
    assert "Traceback" not in text


@pytest.mark.exhaustive
@pytest.mark.slow
def test_prompts_that_the_agent_or_the_reward_cannot_do_cost_themselves_alone(policy: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    hanging = ("agent.kind=tests.support.hanging_agent:HangingAgent", "agent.timeout_s=3", "train.num_updates=20")
    raising = "reward.function=tests.support.hanging_agent:raising"
    on_policy = "rollout.max_policy_lag=0"  # so that the run waits for the trajectory that hangs
    status, text = finish(arguments(policy, output, *hanging, raising, on_policy, *ONE), tmp_path / "log")
    assert status == 0, text
    found = rows(output)
    assert found[-1]["update"] == 20
    assert found[-1]["rollout/failed_prompts"] == 4
    assert found[-1]["rollout/failure_rate"] == pytest.approx(4 / 64, abs=0.02)
    reasons = read_failures(output)
    assert reasons.keys() == HANGS | RAISES
    assert "agent.timeout_s=3" in reasons["11"]
    assert "hanging_agent:raising' on prompt '7': KeyError: 'no answer to 7'" in reasons["7"]
    assert "prompts failed and are set aside (failed_prompts.jsonl); the commonest reason: " in text
    assert "| failing prompts " in text
    assert "failed prompts        4 set aside" in text
    assert "3 x RewardError" in text
    assert "1 x AgentTimeoutError" in text
