"""The picture and the summary, from a record as the trainer writes it."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from megatron_fr.errors import MegatronFRError
from megatron_fr.observe.failures import append_failures
from megatron_fr.observe.metrics import METRICS_FILE, MetricsWriter, read_metrics
from megatron_fr.observe.plot import PANELS, draw, plot_run, trailing_mean
from megatron_fr.observe.report import report_run
from tests.support.small_disk import SmallDisk


@pytest.fixture
def run_dir(tmp_path):
    """Forty updates whose reward rises from 0.1 to 0.9, one of them without signal."""
    folder = tmp_path / "rising"
    with MetricsWriter(folder) as writer:
        writer.write({"update": 0, "version": 0, "eval/reward/mean": 0.1, "eval/tools/calls": 0.2})
        for update in range(1, 41):
            done = update / 40
            row = {
                "update": update, "version": update, "reward/mean": 0.1 + 0.8 * done, "tools/calls": 1 + done,
                "tools/errors": 0.2, "trajectory/truncated": 0.25, "trajectory/tokens_p50": 100,
                "trajectory/tokens_p99": 200, "policy/entropy": 1 - done / 2, "trust_region/seq_kl_mean": 1e-5,
                "trust_region/seq_kl_max": 2e-3 if update == 7 else 1e-4, "trust_region/admitted": 0.95,
                "policy/train_rollout_logprob_diff": 4e-3,
                "sync/probe_logprob_diff": 1e-6,
                "policy_lag/min": 0, "policy_lag/mean": 1.5, "policy_lag/max": 3, "time/wait": 1.0,
                "time/forward_backward": 2.0, "time/optimizer": 0.5, "time/sync": 0.5, "time/update": 4.0,
                "rollout/tokens_per_s": 1500, "train/tokens_per_s": 3000, "train/stepped": update != 5,
            }  # fmt: skip
            if update % 10 == 0:
                row["policy/train_rollout_logprob_diff_without_replay"] = 6e-2
            if update == 30:
                row |= {"eval/reward/mean": 0.95, "eval/tools/calls": 1.9}
            if update == 12:
                row["train/loss"] = math.nan
            row["rollout/routes_missing"] = 2 * (update == 7)
            writer.write(row)
        writer.write({"update": 40, "version": 40, "eval/reward/mean": 0.9, "eval/tools/calls": 2.0})
    return folder


@pytest.mark.slow
def test_the_picture_is_a_png_of_readable_size_with_ink_in_every_panel(run_dir):
    pixels = imread(plot_run(run_dir / METRICS_FILE, run_dir / "x.png"))
    height, width = pixels.shape[:2]
    assert width >= 1200
    assert height >= 1200
    for row in range(4):
        for column in range(2):
            panel = pixels[row * height // 4 : (row + 1) * height // 4, column * width // 2 : (column + 1) * width // 2]
            coloured = (panel[..., :3].max(axis=-1) - panel[..., :3].min(axis=-1)) > 0.3
            assert coloured.sum() > 500, (row, column)


def test_the_reward_panel_shows_batches_and_held_out_points(run_dir):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    draw(axes, PANELS[0], read_metrics(run_dir / METRICS_FILE))
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert lines["held-out"].get_xydata().tolist() == [[0, 0.1], [30, 0.95], [40, 0.9]]
    assert len(lines["training batch"].get_xdata()) == 40
    assert {text.get_text() for text in axes.texts} == {"0.10", "0.90"}


def test_the_drift_panel_shows_what_the_difference_would_be_without_replay(run_dir):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    draw(axes, PANELS[3], read_metrics(run_dir / METRICS_FILE))
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert lines["without routing replay"].get_xydata().tolist() == [[u, 6e-2] for u in (10, 20, 30, 40)]


@pytest.mark.slow
def test_a_record_of_one_evaluation_and_no_update_can_be_drawn(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write({"update": 0, "eval/reward/mean": 0.1})
    assert plot_run(writer.path, tmp_path / "x.png").stat().st_size > 10_000
    assert "best held-out reward  0.100 at update 0" in report_run(tmp_path)


def test_smoothing_is_a_trailing_mean_over_a_twentieth():
    values = [float(i) for i in range(40)]
    assert trailing_mean(values)[:3] == [0, 0.5, 1.5]
    assert trailing_mean(values[:10]) == values[:10]


def test_the_report_names_start_end_best_tools_lag_and_where_the_results_are(run_dir):
    (run_dir / "checkpoints").mkdir()
    append_failures(run_dir, {"p1": "KeyError: 'x'", "p2": "KeyError: 'y'"})
    text = report_run(run_dir)
    for part in (
        "Run rising: 40 updates, 1 of them without signal and without a step, 3 min of training",
        "failed prompts        2 set aside: 2 x KeyError: 'y'",
        "failed_prompts.jsonl  prompts that failed",
        "held-out reward       0.100 at the start, 0.900 at the end",
        "best held-out reward  0.950 at update 30",
        "training reward       0.150 at the start, 0.870 at the end",
        "held-out tool calls   0.20 at the start, 2.00 at the end",
        "training tool calls   1.06 at the start, 1.96 at the end",
        "truncated             25.0% at the start, 25.0% at the end",
        "policy lag            1.50 on average, largest 3",
        "admitted              95.00% on average",
        "sequence KL           1.0e-05 on average, largest 2.0e-03",
        "log-prob. difference  4.0e-03 on average",
        "  without replay      6.0e-02 on average",
        "routes missing        2 trajectories took the live router",
        "tokens a second       1,500 generated, 3,000 trained",
        "time split            wait 25%, forward and backward 50%, optimizer 12%, sync 12%",
        "non-finite values     1 recorded as null",
        f"Results in {run_dir}:",
        "run.png",
        "checkpoints           models as Hugging Face folders",
    ):
        assert part in text
    assert "config.yaml" not in text  # not there, so not promised
    assert (run_dir / "run.png").exists()


def test_a_folder_without_a_run_is_one_clear_error(tmp_path):
    with pytest.raises(MegatronFRError, match=r"No such file.*give the folder of a run"):
        report_run(tmp_path / "nothing")


def test_a_full_disk_costs_the_picture_and_not_the_summary(tmp_path: Path, small_disk: SmallDisk) -> None:
    (small_disk.folder / METRICS_FILE).write_text('{"update": 1, "reward/mean": 0.5}\n')
    small_disk.fill(but=0)
    text = report_run(small_disk.folder)
    assert "training reward       0.500" in text
    assert text.splitlines()[-1] == "No run.png: No space left on device"
    assert not (small_disk.folder / "run.png").exists()
    assert "run.png  " not in text


@pytest.mark.filterwarnings("error")
def test_a_name_in_any_alphabet_reaches_the_picture_and_an_ascii_terminal(tmp_path: Path) -> None:
    run = tmp_path / "\u6b63\u786e"
    run.mkdir()
    (run / METRICS_FILE).write_text('{"update": 1, "reward/mean": 0.5}\n')
    report_run(run)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_fr.cli", "report", str(run)],
        capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Run \\u6b63\\u786e: 1 updates" in done.stdout
