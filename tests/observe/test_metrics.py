"""The record of a run: writing, resuming, reading."""

import json
import math
import shutil
import time

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_fr.errors import MegatronFRError
from megatron_fr.observe.metrics import METRICS_FILE, MetricsWriter, read_metrics, series


def test_each_update_is_one_json_line_on_disk_at_once_and_a_tensorboard_scalar(tmp_path):
    with MetricsWriter(tmp_path / "new" / "run") as writer:
        for update in (1, 2):
            writer.write({"update": update, "reward/mean": np.float32(0.5) * update, "train/loss": torch.tensor(-0.25)})
            lines = writer.path.read_text().splitlines()
            assert len(lines) == update
        assert json.loads(lines[1]) == {"update": 2, "reward/mean": 1.0, "train/loss": -0.25, "metrics/non_finite": 0}
    board = EventAccumulator(str(tmp_path / "new" / "run" / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in board.Scalars("reward/mean")] == [(1, 0.5), (2, 1.0)]


def test_non_finite_values_become_null_and_are_counted(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        row = writer.write({"update": 1, "a": math.nan, "b": torch.tensor(math.inf), "c": 1})
        writer.write({"update": 2, "a": -math.inf, "b": 0.5, "c": True})
        assert row == {"update": 1, "a": None, "b": None, "c": 1, "metrics/non_finite": 2}
    rows = read_metrics(tmp_path / METRICS_FILE)
    assert series(rows, "metrics/non_finite") == ([1, 2], [2, 1])
    assert series(rows, "b") == ([2], [0.5])
    assert series(rows, "a") == ([], [])


def test_a_resumed_run_appends_and_its_repeated_updates_replace_the_first_ones(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for update in range(1, 6):
            writer.write({"update": update, "reward/mean": 0.1 * update})
    with writer.path.open("a") as file:
        file.write('{"update": 6, "rewa')  # killed while writing
    with MetricsWriter(tmp_path) as writer:  # resumes from the checkpoint of update 3
        writer.write({"update": 4, "reward/mean": 0.9})
    assert len(writer.path.read_text().splitlines()) == 6
    assert series(read_metrics(writer.path), "reward/mean") == ([1, 2, 3, 4], pytest.approx([0.1, 0.2, 0.3, 0.9]))


def test_tensorboard_shows_repeated_updates_once(tmp_path):
    for first, value in ((0, 0.5), (3, 0.75)):
        with MetricsWriter(tmp_path, first) as writer:
            for update in range(first, first + 5):
                writer.write({"update": update, "reward/mean": value})
        time.sleep(1.1)  # files are read in the order of the second in their names
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in board.Scalars("reward/mean")] == [
        *((update, 0.5) for update in range(3)),
        *((update, 0.75) for update in range(3, 8)),
    ]


def test_an_evaluation_row_joins_the_update_it_belongs_to(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write({"update": 0, "eval/reward/mean": 0.1})
        writer.write({"update": 1, "reward/mean": 0.2})
        writer.write({"update": 1, "eval/reward/mean": 0.3})
    rows = read_metrics(writer.path)
    assert [row["update"] for row in rows] == [0, 1]
    assert (rows[1]["reward/mean"], rows[1]["eval/reward/mean"]) == (0.2, 0.3)


def test_a_missing_empty_or_damaged_record_is_one_clear_error(tmp_path):
    path = tmp_path / METRICS_FILE
    with pytest.raises(MegatronFRError, match="give the folder of a run"):
        read_metrics(path)
    path.write_text('{"update": 1')
    with pytest.raises(MegatronFRError, match="no update yet"):
        read_metrics(path)
    path.write_text('{"update": 1}\n{"reward/mean": 2}\n')
    with pytest.raises(MegatronFRError, match="line 2 is damaged"):
        read_metrics(path)


def test_a_row_without_its_update_is_a_programming_error(tmp_path):
    with MetricsWriter(tmp_path) as writer, pytest.raises(KeyError, match="update"):
        writer.write({"reward/mean": 1.0})


def test_a_full_disk_is_one_clear_error_and_closing_raises_no_second_one(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer._file.close()
    with open("/dev/full", "wb", buffering=0) as full:
        writer._file = full
        with pytest.raises(MegatronFRError, match=r"No space left.*free space or set output"):
            writer.write({"update": 1})
        writer.close()


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MegatronFRError, match=r"cannot write .*metrics.jsonl"):
        MetricsWriter(tmp_path / "file")


def test_a_tensorboard_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(MegatronFRError, match=r"cannot write .*/tensorboard: File exists; mend that or set output"):
        MetricsWriter(tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the writer's thread
def test_a_full_disk_under_tensorboard_is_one_clear_error(tmp_path, small_disk):
    (tmp_path / "tensorboard").symlink_to(small_disk.folder)
    writer = MetricsWriter(tmp_path)
    writer.write({"update": 1, "a": 1.0})
    small_disk.fill(but=0)
    with pytest.raises(MegatronFRError, match=r"cannot write .*/tensorboard: No space left"):
        writer.write({f"a{number}": 1.0 for number in range(5000)} | {"update": 2})
    writer.close()


def test_rows_do_not_vanish_in_a_deleted_folder(tmp_path):
    writer = MetricsWriter(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(MegatronFRError, match=r"/run/metrics.jsonl was deleted while the run wrote to it; set output"):
        writer.write({"update": 1})
    writer.close()
