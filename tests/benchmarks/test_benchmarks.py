"""Each benchmark runs with --quick and ends with one JSON object that has its figures."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fr.runtime.spawn import tied_to_us

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "loss": ("keep_time_ratio", "recompute_time_ratio", "keep_memory_ratio", "recompute_memory_ratio"),
    "convert": ("time_ratio_vs_copy", "to_hf_memory_over_bound", "to_megatron_memory_over_model"),
    "sandbox": (
        *(f"{way}_calls_per_s_{n}" for way in ("sandbox", "python", "bwrap") for n in (1, 64, 500)),
        *(f"event_loop_delay_ms_{n}" for n in (1, 64, 500)),
    ),
    "step": ("step_ratio_vs_floor",),
    "main_job": (
        *("update_s", "wait_s", "forward_backward_s", "optimizer_s", "sync_s", "probe_s"),
        *("trained_tokens_per_s", "generated_tokens_per_s", "throughput_vs_training_alone"),
    ),
}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", KEYS)
def test_the_quick_benchmark_ends_with_its_figures(name: str) -> None:
    done = subprocess.run(
        tied_to_us([sys.executable, "-m", f"benchmarks.{name}", "--quick"]),
        capture_output=True,
        text=True,
        timeout=400,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["benchmark"] == name
    assert all(math.isfinite(figures[key]) and figures[key] > 0 for key in KEYS[name])
