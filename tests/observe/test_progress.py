"""The live line and the alarms."""

import io

import pytest

from megatron_fr.observe.failures import append_failures
from megatron_fr.observe.progress import WINDOW, Alarms, Progress, duration

ROW = {
    "update": 3, "reward/mean": 0.4123, "tools/calls": 1.256, "policy_lag/mean": 1.25,
    "policy_lag/max": 4, "trust_region/admitted": 0.984,
    "trust_region/seq_kl_mean": 3.2e-5,
                "policy/train_rollout_logprob_diff": 0.0021, "rollout/tokens_per_s": 1234.0,
    "train/tokens_per_s": 2.5e6, "time/update": 4.21, "train/stepped": True,
}  # fmt: skip


def test_the_line_says_everything_in_plain_text():
    assert Progress(120).line(ROW) == (
        "update   3/120 | reward 0.412 | tool calls 1.26 | lag 1.2 (max 4) | admitted 98.4% | KL 3.2e-05 | "
        "logprob diff 2.1e-03 | tokens/s 1.2k generated, 2.5M trained | 4.2 s | - left"
    )


def test_what_replay_saves_is_shown_where_it_was_measured():
    line = Progress(120).line({**ROW, "policy/train_rollout_logprob_diff_without_replay": 0.034})
    assert "| logprob diff 2.1e-03 (3.4e-02 without replay) | tokens/s" in line


def test_missing_and_null_metrics_show_as_a_dash_and_special_updates_say_so():
    line = Progress(9).line({"update": 1, "reward/mean": None, "train/stepped": False, "eval/reward/mean": 0.5})
    assert "reward - | tool calls - | lag - (max -)" in line
    assert line.endswith("no signal, no step | held-out reward 0.500")


def test_the_time_left_follows_this_process_also_after_a_resume():
    now = [1000.0]
    progress = Progress(50, clock=lambda: now[0])
    assert "- left" in progress.line({**ROW, "update": 41})
    now[0] += 20
    assert "3 min left" in progress.line({**ROW, "update": 42})  # 20 s for 1 update, 8 to go
    now[0] += 10
    assert "2 min left" in progress.line({**ROW, "update": 43})
    now[0] += 90
    assert "4 min left" in progress.line({**ROW, "update": 44})  # 120 s for 3 updates, 6 to go
    assert "0 s left" in progress.line({**ROW, "update": 50})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (99, "99 s"), (150, "2 min"), (5940, "99 min"), (11100, "3 h 05 min"), (187200, "2 d 4 h")],
)
def test_durations_are_readable(seconds, text):
    assert duration(seconds) == text


def test_lines_are_printed_one_an_update_with_alarms_below():
    stream = io.StringIO()
    progress = Progress(20, stream)
    for update in range(1, 21):
        progress.update({**ROW, "update": update, "tools/calls": 2.0 if update <= 10 else 0.1})
    lines = stream.getvalue().splitlines()
    assert sum(line.startswith("update ") for line in lines) == 20
    alarms = [line for line in lines if line.startswith("  !")]
    assert alarms == ["  ! tool calls fell to 0.48 a trajectory from 2.00"]
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_prompts_set_aside_are_said_with_the_commonest_reason_and_again_at_twice_as_many(tmp_path):
    append_failures(tmp_path, {"p1": "KeyError: 'x'", "p2": "KeyError: 'y'", "p3": "ValueError"})
    stream = io.StringIO()
    progress = Progress(20, stream, folder=tmp_path)
    for update, failed in enumerate((0, 1, 1, 2, 3, 4), start=1):
        counted = {"rollout/failed_prompts": failed, "rollout/failure_rate": failed / 50}
        progress.update({**ROW, **counted, "update": update})
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("  !")] == ["1", "2", "4"]
    expected = "  ! 4 prompts failed and are set aside (failed_prompts.jsonl); the commonest reason: 2 x KeyError: 'y'"
    assert lines[-1] == expected
    assert "failing prompts" not in lines[0]
    assert lines[-2].endswith("| failing prompts 8.0%")


@pytest.mark.parametrize(
    ("metric", "good", "bad", "message"),
    [
        ("policy/entropy", 1.0, 0.01, "stops exploring"),
        ("policy/train_rollout_logprob_diff", 0.004, 0.2, "drift apart"),
        ("trust_region/admitted", 0.99, 0.2, "of the trajectories pass"),
        ("trajectory/truncated", 0.1, 0.8, "are cut off"),
        ("tools/refused_total", 0, 3, "the tool sandbox fails to run calls"),
        ("rollout/routes_missing", 0, 3, "trajectories a batch have no usable routes"),
        ("tools/calls", 3.0, 0.0, "tool calls fell"),
        ("rollout/failure_rate", 0.02, 0.3, "of the prompts fail for good"),
        ("rollout/event_loop_delay_ms", 60, 2500, "blocks the event loop"),
    ],
)
def test_an_alarm_speaks_once_when_its_metric_goes_bad_and_again_after_recovery(metric, good, bad, message):
    alarms = Alarms()

    def phase(value, updates=2 * WINDOW):
        return [m for _ in range(updates) for m in alarms.check({metric: value})]

    assert phase(good) == []
    assert [message in m for m in phase(bad)] == [True]
    assert [m for _ in range(4) for value in (good, bad) for m in phase(value)] == []  # it hovers
    assert phase(good, 6 * WINDOW) == []
    assert len(phase(bad)) == 1
    assert alarms.check({metric: None}) == []


def test_one_odd_batch_and_tasks_without_tools_raise_no_alarm():
    alarms = Alarms()
    values = [2.0, 2.0, 2.0, 2.0, 2.0, 0.0, 2.0, 2.0]
    assert [m for v in values for m in alarms.check({"tools/calls": v})] == []
    assert [m for _ in range(20) for m in Alarms().check({"tools/calls": 0.0})] == []


def test_the_line_before_the_first_batch_shows_only_what_is_known() -> None:
    row = {"update": 0, "sync/probe_logprob_diff": 2e-7, "eval/reward/mean": 0.41}
    assert Progress(80).line(row) == "update  0/80 | first sync: logprob diff 2.0e-07 | held-out reward 0.410"
    assert Progress(80).line({"update": 0}) == "update  0/80 | first sync: logprob diff -"
