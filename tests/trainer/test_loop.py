"""The trainer's loop around stand-ins for model, service and engines, in a world of one rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_fr.checkpoint.store import RunRecord
from megatron_fr.errors import CheckpointError, RequestFailed, SyncError
from megatron_fr.observe.metrics import METRICS_FILE, read_metrics
from megatron_fr.trainer.data.loader import Shutdown
from megatron_fr.trainer.loop import TrainerLoop
from megatron_fr.trainer.step import StepReport
from megatron_fr.trainer.weight_push import SyncMetrics


@pytest.fixture(autouse=True)
def world_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Stop:
    asked = False

    def __bool__(self) -> bool:
        return self.asked


def make_loop(output: Path, *, evaluate_s: float = 0.0, broken_from: int = 10**9) -> Any:
    """3 updates with an evaluation after each; the sync fails from version ``broken_from`` on."""
    loop: Any = TrainerLoop.__new__(TrainerLoop)
    loop._stop = Stop()
    loop._first_rank = True
    loop._update = loop._version = 0
    loop._saved_hf, loop._score = -1, None
    loop.saved = []
    loop._config = SimpleNamespace(
        output=output,
        data=SimpleNamespace(eval="held-out.jsonl"),
        train=SimpleNamespace(num_updates=3, skip_without_signal=True, replay_check_every=2),
        evaluation=SimpleNamespace(every=1),
        checkpoint=SimpleNamespace(every=0, hf_every=0),
    )

    def evaluate(name: str) -> dict[str, float]:
        if name == "update-2":
            time.sleep(evaluate_s)
        return {"reward": 0.5}

    def push(version: int) -> SyncMetrics:
        if version >= broken_from:
            raise SyncError("an engine refused")
        return SyncMetrics(0.1, 0.01, 8, 0.1, None)

    def next_batch(_version: int, should_stop: Any) -> Any:
        if should_stop():
            raise Shutdown
        lease = SimpleNamespace(batch_id="b", metrics={"reward/mean": 0.25})
        return SimpleNamespace(lease=lease, signal=True, micro_batches=[], constants=None, num_tokens=8, wait_s=0.0)

    def update(*_: Any, check_replay: bool) -> StepReport:
        return StepReport({"checked": float(check_replay)}, 0.1, 0.1, stepped=True)

    step = SimpleNamespace(update=update, skip=lambda: None)
    loop._policy = SimpleNamespace(step=step, save_hf=lambda folder: loop.saved.append(folder.name))
    loop._client = SimpleNamespace(evaluate=evaluate, start=lambda _: None, commit=lambda *_, **__: None)
    loop._sync = SimpleNamespace(push=push, finish_probe=dict)
    loop._feed = SimpleNamespace(next=next_batch)
    loop.finished = []
    finish = lambda: loop.finished.append(loop._update)  # noqa: E731
    loop._checkpoints = SimpleNamespace(poll=lambda: None, begin=lambda **_: None, finish=finish)
    return loop


def test_an_interrupted_evaluation_does_not_cost_the_metrics_of_its_update(tmp_path: Path) -> None:
    loop = make_loop(tmp_path, evaluate_s=1.5)
    plain = loop._look_after

    def look_after(pending: Any) -> Any:
        loop._stop.asked = loop._update == 2
        return plain(pending)

    loop._look_after = look_after
    assert loop.run().name == "update-000002"
    rows = read_metrics(tmp_path / METRICS_FILE)
    assert [row["update"] for row in rows] == [0, 1, 2]
    assert [row.get("eval/reward") for row in rows] == [0.5, 0.5, None]
    assert rows[2]["reward/mean"] == 0.25


def test_an_evaluation_longer_than_one_turn_is_waited_for(tmp_path: Path) -> None:
    loop = make_loop(tmp_path, evaluate_s=1.5)
    assert loop.run().name == "update-000003"
    assert [row["eval/reward"] for row in read_metrics(tmp_path / METRICS_FILE)] == [0.5] * 4


def test_weights_that_reached_no_engine_are_saved_under_their_own_update(tmp_path: Path) -> None:
    loop = make_loop(tmp_path, broken_from=2)
    with pytest.raises(SyncError, match="an engine refused"):
        loop.run()
    assert loop.saved == ["update-000002"]


def test_a_failure_waits_for_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    loop = make_loop(tmp_path, broken_from=2)
    with pytest.raises(SyncError):
        loop.run()
    assert loop.finished == [2]


def test_a_checkpoint_that_fails_costs_neither_the_weights_nor_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = make_loop(tmp_path, broken_from=2)

    def finish() -> None:
        raise CheckpointError("no space left")

    loop._checkpoints.finish = finish
    with pytest.raises(SyncError, match="an engine refused"):
        loop.run()
    assert loop.saved == ["update-000002"]
    assert "the training checkpoint could not be saved: no space left" in capsys.readouterr().out


@pytest.mark.parametrize("error", [CheckpointError("no space left"), RequestFailed("nobody answers")])
def test_the_last_weights_are_saved_where_the_last_checkpoint_cannot_be(tmp_path: Path, error: Exception) -> None:
    loop = make_loop(tmp_path)

    def begin(**_: Any) -> None:
        raise error

    loop._checkpoints.begin = begin
    with pytest.raises(type(error), match=str(error)):
        loop.run()
    assert loop.saved == ["update-000003"]


def test_a_trainer_that_starts_anew_beside_a_service_that_has_gone_on_touches_nothing(tmp_path: Path) -> None:
    loop = make_loop(tmp_path)
    (tmp_path / "training_state" / "update-000002").mkdir(parents=True)
    loop._client.status = lambda: {"version": 2, "consumed_batches": 2}
    with pytest.raises(CheckpointError, match="stands at update 2, version 2: restart it too"):
        loop._start_anew()
    assert (tmp_path / "training_state" / "update-000002").is_dir()
    loop._client.status = lambda: {"version": 0, "consumed_batches": 0}
    loop._start_anew()
    assert not (tmp_path / "training_state").exists()


def test_a_checkpoint_of_another_update_than_the_service_is_not_even_loaded(tmp_path: Path) -> None:
    loop = make_loop(tmp_path)
    loaded: list[Path] = []
    loop._checkpoints.load = loaded.append
    loop._checkpoints.set_newer_aside = lambda: None
    folder = tmp_path / "training_state" / "update-000004"
    folder.mkdir(parents=True)
    RunRecord(update=4, version=3).write(folder)
    loop._client.status = lambda: {"version": 3, "consumed_batches": 3}
    with pytest.raises(CheckpointError, match="is of update 4, version 3; the rollout service stands at update 3"):
        loop._go_on_from(folder)
    assert not loaded
    loop._client.status = lambda: {"version": 3, "consumed_batches": 4}
    loop._go_on_from(folder)
    assert loaded == [folder]
    assert (loop._update, loop._version) == (4, 3)


def test_a_folder_of_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "update-000003").mkdir(parents=True)
    loop = make_loop(tmp_path)
    loop.run()
    loop.save_hf()
    assert loop.saved == ["update-000003"]  # written although it was there, and once


def test_what_replay_changes_is_measured_every_so_many_updates(tmp_path: Path) -> None:
    make_loop(tmp_path).run()
    assert [row.get("checked") for row in read_metrics(tmp_path / METRICS_FILE)] == [None, 0, 1, 0]
