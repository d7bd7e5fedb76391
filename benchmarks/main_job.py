"""The main job, end to end: real engine, real agents and tools, real trainer, on a tiny untrained policy.

    python -m benchmarks.main_job [--quick]

Runs ``megatron-fr train`` on ``configs/tiny_python_tool.yaml`` with small numbers and reads its ``metrics.jsonl``. The
first update is left out: it waits for the first rollouts and warms everything up. The last line is one JSON object:

- ``update_s`` and its parts, means over updates: ``wait_s`` for trajectories, ``forward_backward_s``, ``optimizer_s``,
  ``sync_s`` (pause, broadcast, continue), ``probe_s`` (the check after each sync), ``other_s`` (fetching and laying out
  the batch, metrics, commit);
- ``trained_tokens_per_s``, ``generated_tokens_per_s``;
- ``throughput_vs_training_alone``: trained tokens a second over those of a trainer that only did forward, backward and
  optimizer on the same batches, measured inside the same updates. 1 would mean that rollouts and syncs are hidden;
- without ``--quick`` also ``async_vs_sync_throughput``: trained tokens a second over those of the same job with
  ``rollout.max_policy_lag=0``, where the trainer waits for each batch to be sampled with its newest weights;
- ``start_s`` from the command to engines that serve, and ``total_s`` of the job.

A policy that knows nothing is rewarded by a coin that its text decides, so that batches have a signal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]

if TYPE_CHECKING:
    from megatron_fr.agents.contract import RewardInput


def coin(episode: RewardInput) -> float:
    """A reward that half of all answers get."""
    return float(zlib.crc32(episode.final_text.encode()) & 1)


def make_model(folder: Path) -> Path:
    """A tiny untrained policy with prompts."""
    import itertools

    from megatron_fr.agents import arithmetic
    from tools.tiny import make_untrained

    make_untrained(folder)
    questions = itertools.islice(arithmetic.questions(1), 512)
    (folder / "train.jsonl").write_text("".join(json.dumps(q.record()) + "\n" for q in questions))
    return folder


def run_job(model: Path, output: Path, updates: int, *overrides: str, timeout_s: float) -> dict[str, float]:
    """Run the job to its end and summarise it.

    Raises:
        SystemExit: it failed, with its output, or took longer than ``timeout_s``.
    """
    from megatron_fr.runtime.spawn import tied_to_us

    command = [
        sys.executable,
        "-m",
        "megatron_fr.cli.__main__",
        "train",
        "--config",
        str(ROOT / "configs/tiny_python_tool.yaml"),
    ]
    settings = [
        f"output={output}",
        f"model.path={model}",
        f"data.train={model}/train.jsonl",
        "data.eval=null",
        "reward.function=benchmarks.main_job:coin",
        f"train.num_updates={updates}",
        "train.batch_size=32",
        "algorithm.delta=1",
        *overrides,
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    started = time.time()
    with (output.parent / f"{output.name}.log").open("w+") as log:
        job = subprocess.Popen(tied_to_us([*command, *settings]), stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            status = job.wait(timeout_s)
        except BaseException:
            job.terminate()  # it ends its own children
            job.wait()
            raise
        total_s = time.time() - started
        if status:
            log.seek(0)
            raise SystemExit(f"the job ended with status {status}:\n{log.read()}")
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {**summarise(rows[2:]), "start_s": (output / "service.url").stat().st_mtime - started, "total_s": total_s}


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Means over updates; the whole update is what the parts add up to."""
    count = len(rows)
    total = sum(row["time/update"] for row in rows)
    mean = {
        f"{name}_s": sum(row[f"time/{name}"] for row in rows) / count
        for name in ("wait", "forward_backward", "optimizer", "sync", "probe")
    }
    trained = sum(row["train/tokens_per_s"] * row["time/update"] for row in rows)
    generated = sum(row["rollout/tokens_per_s"] * row["time/update"] for row in rows)
    alone = (mean["forward_backward_s"] + mean["optimizer_s"]) * count
    return {
        "updates": count,
        "update_s": total / count,
        **mean,
        "other_s": total / count - sum(mean.values()),
        "trained_tokens_per_s": trained / total,
        "generated_tokens_per_s": generated / total,
        "throughput_vs_training_alone": alone / total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one short job with one engine: about 65 s on two idle cores, most of it start-up",
    )
    parser.add_argument("--timeout-s", type=float, default=600, help="of one job (default: 600)")
    arguments = parser.parse_args()
    updates = 6 if arguments.quick else 40
    # One engine starts faster than two side by side on two cores.
    smaller = ["rollout.engines=1", "train.batch_size=16"] if arguments.quick else []
    with tempfile.TemporaryDirectory(prefix="main-job-") as name:
        root = Path(name)
        model = make_model(root / "model")
        row = run_job(model, root / "run", updates, *smaller, timeout_s=arguments.timeout_s)
        if not arguments.quick:
            print({"asynchronous": row}, flush=True)
            synchronous = run_job(
                model, root / "synchronous", updates, "rollout.max_policy_lag=0", timeout_s=arguments.timeout_s
            )
            print({"synchronous": synchronous}, flush=True)
            row["async_vs_sync_throughput"] = row["trained_tokens_per_s"] / synchronous["trained_tokens_per_s"]
            row["synchronous_update_s"] = synchronous["update_s"]
    rounded = {key: round(value, 4) for key, value in row.items()}
    print(json.dumps({"benchmark": "main_job", "quick": arguments.quick, **rounded}))


if __name__ == "__main__":
    main()
