"""The trainer's loop with stand-ins for model, service and engines, in a world of one rank."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_fr.checkpoint.store import RunRecord, complete
from megatron_fr.config import RunConfig
from megatron_fr.errors import CheckpointError, MegatronFRError, RequestFailed, SyncError
from megatron_fr.observe.metrics import METRICS_FILE, read_metrics
from megatron_fr.trainer.data.loader import Shutdown
from megatron_fr.trainer.evaluation import run_evaluation
from megatron_fr.trainer.loop import RunPosition, TrainerLoop
from megatron_fr.trainer.run import begin_anew, go_on_from, recorder, run_and_save, weight_export
from megatron_fr.trainer.step import StepReport


@pytest.fixture(autouse=True)
def world_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Bench:
    """A loop of 3 updates with an evaluation after each.

    Args:
        evaluate_s: seconds that the evaluation of update 2 takes.
        stop_in: the evaluation during which the run is asked to stop.
        broken_from: the first version that the engines refuse.
        begin_error, finish_error: what beginning and finishing a checkpoint raise.
    """

    def __init__(
        self,
        output: Path,
        *,
        evaluate_s: float = 0.0,
        stop_in: str | None = None,
        broken_from: int = 10**9,
        begin_error: Exception | None = None,
        finish_error: Exception | None = None,
    ) -> None:
        self.output = output
        self.config = RunConfig.model_validate(
            {
                "output": output,
                "model": {"path": "unused"},
                "data": {"train": "unused.jsonl", "eval": "held-out.jsonl"},
                "reward": {"function": "unused:unused"},
                "train": {"num_updates": 3, "replay_check_every": 2},
                "evaluation": {"every": 1},
                "checkpoint": {"every": 0, "hf_every": 0},
            }
        )
        self.evaluate_s, self.stop_in, self.broken_from = evaluate_s, stop_in, broken_from
        self.begin_error, self.finish_error = begin_error, finish_error
        self.asked_to_stop = False
        self.finished_at: list[int] = []  # updates
        self.saved: list[str] = []  # names of Hugging Face folders
        self.position = RunPosition()

    def __bool__(self) -> bool:
        return self.asked_to_stop

    def run(self) -> Path:
        with recorder(self.config) as record:
            self.loop: Any = TrainerLoop(
                config=self.config,
                position=self.position,
                loader=self,  # type: ignore[arg-type]
                step=SimpleNamespace(update=self.update, skip=None),  # type: ignore[arg-type]
                sync=self,  # type: ignore[arg-type]
                evaluate=partial(run_evaluation, self, self),  # type: ignore[arg-type]
                checkpoints=self,  # type: ignore[arg-type]
                export=weight_export(self.output, lambda folder: self.saved.append(folder.name)),
                record=record,
            )
            return run_and_save(self.loop)

    def start(self, version: int) -> None:
        assert version == 0

    def lease(self, _version: int) -> Any:
        if self.asked_to_stop:
            raise Shutdown
        lease = SimpleNamespace(batch_id="b", metrics={"reward/mean": 0.25})
        return SimpleNamespace(lease=lease, signal=True, micro_batches=[], constants=None, num_tokens=8, wait_s=0.0)

    def update(self, *_: Any, check_replay: bool) -> StepReport:
        return StepReport({"checked": float(check_replay)}, 0.1, 0.1, stepped=True)

    def push(self, version: int) -> dict[str, float]:
        if version >= self.broken_from:
            raise SyncError("an engine refused")
        self.pushed = version
        return {"sync/seconds": 0.1}

    def finish_probe(self) -> dict[str, float]:
        assert self.position.version == self.pushed  # the weights are still those of the push
        return {"sync/probe_version": float(self.pushed)}

    def commit(self, *_: Any, **__: Any) -> None:
        assert self.position.version == self.position.update

    def evaluate(self, name: str) -> dict[str, float]:
        self.asked_to_stop = name == self.stop_in
        if name == "update-2":
            time.sleep(self.evaluate_s)
        return {"reward/mean": 0.5}

    def begin(self, **_: Any) -> None:
        if self.begin_error is not None:
            raise self.begin_error

    def finish(self, *, wait: bool = True) -> None:
        if not wait:
            return
        self.finished_at.append(self.position.update)
        if self.finish_error is not None:
            raise self.finish_error


def test_an_interrupted_evaluation_does_not_cost_the_metrics_of_its_update(tmp_path: Path) -> None:
    assert Bench(tmp_path, evaluate_s=1.5, stop_in="update-2").run().name == "update-000002"
    rows = read_metrics(tmp_path / METRICS_FILE)
    assert [row["update"] for row in rows] == [0, 1, 2]
    assert [row.get("eval/reward/mean") for row in rows] == [0.5, 0.5, None]
    assert rows[2]["reward/mean"] == 0.25


def test_an_evaluation_longer_than_one_turn_is_waited_for(tmp_path: Path) -> None:
    assert Bench(tmp_path, evaluate_s=1.5).run().name == "update-000003"
    assert [row["eval/reward/mean"] for row in read_metrics(tmp_path / METRICS_FILE)] == [0.5] * 4


def test_weights_that_reached_no_engine_are_saved_under_their_own_update(tmp_path: Path) -> None:
    bench = Bench(tmp_path, broken_from=2)
    with pytest.raises(SyncError, match="an engine refused"):
        bench.run()
    assert bench.saved == ["update-000002"]


def test_a_failure_waits_for_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    bench = Bench(tmp_path, broken_from=2)
    with pytest.raises(SyncError):
        bench.run()
    assert bench.finished_at == [2]


def test_a_checkpoint_that_fails_costs_neither_the_weights_nor_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(tmp_path, broken_from=2, finish_error=CheckpointError("no space left"))
    with pytest.raises(SyncError, match="an engine refused"):
        bench.run()
    assert bench.saved == ["update-000002"]
    assert "the training checkpoint could not be saved: no space left" in capsys.readouterr().out


@pytest.mark.parametrize("error", [CheckpointError("no space left"), RequestFailed("nobody answers")])
def test_the_last_weights_are_saved_where_the_last_checkpoint_cannot_be(tmp_path: Path, error: Exception) -> None:
    bench = Bench(tmp_path, begin_error=error)
    with pytest.raises(type(error), match=str(error)):
        bench.run()
    assert bench.saved == ["update-000003"]


def test_a_record_that_cannot_be_written_costs_no_weights_and_says_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "run")

    def delete_output(name: str) -> dict[str, float]:
        if name == "update-2":
            shutil.rmtree(tmp_path / "run")
        return {"reward/mean": 0.5}

    monkeypatch.setattr(bench, "evaluate", delete_output)
    with pytest.raises(MegatronFRError, match=r"/run/metrics.jsonl was deleted while the run wrote to it"):
        bench.run()
    assert bench.saved == ["update-000002"]
    said = capsys.readouterr().out
    assert "there is no training checkpoint\nsaved the weights of update 2 in " in said


def service(version: int, consumed_batches: int) -> Any:
    return SimpleNamespace(status=lambda: {"version": version, "consumed_batches": consumed_batches})


def test_a_trainer_that_starts_anew_beside_a_service_that_has_gone_on_touches_nothing(tmp_path: Path) -> None:
    (tmp_path / "training_state" / "update-000002").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="stands at update 2, version 2: restart it too"):
        begin_anew(tmp_path, service(2, 2))
    assert (tmp_path / "training_state" / "update-000002").is_dir()
    assert begin_anew(tmp_path, service(0, 0)) == RunPosition(0, 0, None)
    assert not (tmp_path / "training_state").exists()


def test_a_checkpoint_of_another_update_than_the_service_is_not_even_loaded(tmp_path: Path) -> None:
    loaded: list[Path] = []
    checkpoints: Any = SimpleNamespace(load=loaded.append, set_newer_aside=lambda: None)
    folder = tmp_path / "training_state" / "update-000004"
    folder.with_suffix(".tmp").mkdir(parents=True)
    complete(folder.with_suffix(".tmp"), RunRecord(update=4, version=3))
    with pytest.raises(CheckpointError, match="is of update 4, version 3; the rollout service stands at update 3"):
        go_on_from(folder, service(3, 3), checkpoints)
    assert not loaded
    assert go_on_from(folder, service(3, 4), checkpoints) == RunPosition(4, 3, None)
    assert loaded == [folder]


def test_a_folder_of_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "update-000003").mkdir(parents=True)
    bench = Bench(tmp_path)
    bench.run()
    bench.loop.export(3)
    assert bench.saved == ["update-000003"]  # written although it was there, and once


def test_what_replay_changes_is_measured_every_so_many_updates(tmp_path: Path) -> None:
    Bench(tmp_path).run()
    assert [row.get("checked") for row in read_metrics(tmp_path / METRICS_FILE)] == [None, 0, 1, 0]
