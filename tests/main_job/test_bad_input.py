"""What a user gets wrong is answered with one clear error, before anything slow starts."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import socket
import time
from pathlib import Path

import pytest

from megatron_fr.checkpoint.store import RunRecord
from megatron_fr.cli.__main__ import main
from megatron_fr.config import load_config
from megatron_fr.config.paths import check_prompt_source
from megatron_fr.errors import CheckpointError, ConfigError, MegatronFRError
from megatron_fr.rollout.cursor import PromptCursor
from megatron_fr.rollout.prompts import load_prompts
from megatron_fr.rollout.service import RolloutService
from megatron_fr.rollout.state import Counters, RolloutState, encode_state
from tests.support.train_command import RECIPE, arguments, finish, options, recipe


def one_error(status: int, text: str) -> str:
    assert status == 1, text
    assert "Traceback" not in text
    assert sum(line.startswith("error: ") for line in text.splitlines()) == 1, text
    return text[text.index("error: ") :]


def error_of(command: list[str], log: Path) -> str:
    return one_error(*finish(command, log))


@pytest.mark.parametrize(
    ("command", "override", "parts"),
    [
        ("train", "train.bach_size=8", ["train.bach_size=8", "'batch_size'"]),
        ("train", "model.path=/nowhere/model", ["model.path='/nowhere/model' is not a folder"]),
        ("eval", "model.path=/nowhere/model", ["model.path='/nowhere/model' is not a folder"]),
        ("train", "data.eval=/nowhere/x.jsonl", ["'/nowhere/x.jsonl': there is no such file"]),
    ],
    ids=["typo", "model", "model_to_evaluate", "prompts"],
)
def test_what_cannot_be_used_is_named_and_no_output_folder_is_made(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, override: str, parts: list[str]
) -> None:
    status = main([command, *options(policy, tmp_path / "run", override)])
    message = one_error(status, capsys.readouterr().err)
    assert all(part in message for part in parts), message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("silent", [pytest.param(True, marks=pytest.mark.slow, id="silent"), False])
def test_a_name_on_a_hub_that_cannot_be_reached_is_refused_at_once(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    with socket.socket() as hub:
        hub.bind(("127.0.0.1", 0))
        if silent:  # takes connections and never answers, as a network that drops what is sent
            hub.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        started = time.monotonic()
        message = error_of(arguments(policy, tmp_path / "run", "model.path=some/model"), tmp_path / "log")
    assert time.monotonic() - started < 40
    assert message.startswith("error: model.path='some/model' is no local folder, and the hub cannot be asked (")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "offline"), [("../typo/x", "0"), ("some/data", "1")])
def test_prompts_that_can_be_no_dataset_are_refused_and_offline_names_are_left_to_the_cache(
    monkeypatch: pytest.MonkeyPatch, name: str, offline: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline == "1")
    if offline == "1":
        check_prompt_source(name)
    else:
        with pytest.raises(ConfigError, match="is no file, folder or hub name"):
            check_prompt_source(name)


@pytest.mark.parametrize(
    ("override", "broken", "reason"),
    [
        ("parallel={world_size: 4, tp: 4}", {}, r"parallel.tp=4 does not divide the model's KV heads \(2\)"),
        (
            "seed=1",
            {"chat_template.jinja": "{{ raise_exception('no system message, please') }}"},
            "chat template in model.path cannot take prompt '0': .*no system message, please",
        ),
        ("seed=1", {"tokenizer.json": '{"version": "1.0"}'}, r"has no usable tokenizer: .*; fetch it again"),
        ("seed=1", {"tokenizer_config.json": "[1]"}, r"has no usable tokenizer: .*; fetch it again"),
    ],
    ids=["layout", "template", "tokenizer", "tokenizer_config"],
)
def test_what_only_the_trainer_or_an_agent_would_find_is_refused_before_an_engine_starts(
    policy: Path, tmp_path: Path, override: str, broken: dict[str, str], reason: str
) -> None:
    model = shutil.copytree(policy, tmp_path / "model")
    for name, text in broken.items():
        (model / name).write_text(text)

    async def start() -> None:
        config = load_config(RECIPE, [o for o in options(model, tmp_path / "run", override) if "=" in o])
        await RolloutService(config).start()

    with pytest.raises(MegatronFRError, match=reason):
        asyncio.run(start())
    assert not (tmp_path / "run" / "logs" / "engine-0.log").exists()


def test_a_checkpoint_of_other_prompts_or_another_model_is_refused_before_an_engine_starts(
    policy: Path, tmp_path: Path
) -> None:
    config = load_config(RECIPE, [o for o in options(policy, tmp_path / "run") if "=" in o])

    def error() -> str:
        async def start() -> None:
            await RolloutService(config, restore=tmp_path / "rollout.state").start()

        with pytest.raises(CheckpointError) as caught:
            asyncio.run(start())
        return str(caught.value)

    def save(cursor: PromptCursor) -> None:
        state = RolloutState(Counters(*[0] * 10), [], cursor.order, [], [])
        (tmp_path / "rollout.state").write_bytes(encode_state(state))

    prompts = load_prompts(policy / "train.jsonl")
    save(PromptCursor([*prompts[1:], dataclasses.replace(prompts[0], answer=0)], config.seed))
    assert "the checkpoint was made with other prompts (ids: " in error()
    save(PromptCursor(prompts, config.seed, config.data.shuffle))
    record = RunRecord(1, 1, fixed={"model.layers": 99, "train.batch_size": 8})
    (tmp_path / "run.json").write_text(json.dumps(dataclasses.asdict(record)))
    assert "is of another run (model.layers: 99 then, " in error()
    assert not (tmp_path / "run" / "logs" / "engine-0.log").exists()


@pytest.mark.slow
def test_a_port_in_use_is_named(policy: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = error_of(arguments(policy, tmp_path / "run", f"rollout.engine_port={port}"), tmp_path / "log")
    assert "rollout.engine_port" in message
    assert str(port) in message


@pytest.mark.slow
def test_an_engine_that_dies_at_start_shows_its_last_words(policy: Path, tmp_path: Path) -> None:
    command = arguments(policy, tmp_path / "run", "rollout.engines=1", "rollout.engine_args={no-such-option: 1}")
    message = error_of(command, tmp_path / "log")
    assert "engine 0" in message
    assert "exit code 2" in message
    assert "unrecognized arguments: --no-such-option 1" in message
    assert len(message.splitlines()) < 8, message  # its usage is a screenful


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_engine_that_computes_something_else_than_the_trainer_ends_the_run(policy: Path, tmp_path: Path) -> None:
    # Two implementations never agree to 1e-12: with that limit a sound engine stands for one with wrong weights.
    command = arguments(policy, tmp_path / "run", "sync.max_probe_difference=1e-12", "rollout.engines=1")
    message = error_of(command, tmp_path / "log")
    assert "after the sync to version 0, engine " in message
    assert "above sync.max_probe_difference=1e-12; the engine's weights or numerics are not the trainer's" in message


@pytest.mark.slow
def test_a_reward_function_that_cannot_be_imported_is_named(policy: Path, tmp_path: Path) -> None:
    message = error_of(arguments(policy, tmp_path / "run", "reward.function=nowhere:reward"), tmp_path / "log")
    assert "reward.function='nowhere:reward'" in message


def test_the_embedded_recipe_is_short_and_says_what_it_is() -> None:
    assert {"model", "algorithm", "train", "rollout", "agent", "reward", "data"} <= recipe().keys()
