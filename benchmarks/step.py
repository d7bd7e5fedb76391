"""A whole FlashREINFORCE update against a plain next-token-loss step of the same Megatron model, the floor.

    python -m benchmarks.step [--quick]

One process with the trainer's batch loader, routing replay, forward and backward through Megatron's schedule, the
admission, gradient clipping and Adam. The floor runs the same model, micro-batches and optimizer with Megatron's
own cross entropy and nothing else: no batch building, routes, gate, entropy or metrics. Two models (``tiny`` is the
embedded run's) and two kinds of trajectories: ``multi_turn`` with half of the tokens observations, ``single_turn`` with
nearly all of them actions, where skipping observations in the head saves nothing.

The last line is one JSON object; ``step_ratio_vs_floor`` is the worst ratio of medians over the cases (goal 1.15) of
which ``cases`` has all. ``--quick`` leaves out ``recompute``, the other mode of ``train.logprob_mode``, and of the
larger model the cheaper kind of trajectories.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import interleave
from megatron_fr.config import RunConfig
from megatron_fr.runtime.device import prepare_process, resolve_device
from megatron_fr.trajectory import Trajectory
from tools.tiny.model import build_untrained, save, tiny_config
from tools.tiny.tokenizer import make_tokenizer

BATCH, MICRO_BATCH, TOKENS = 16, 8, 128
#: Changes of :func:`tiny_config`.
MODELS: dict[str, dict[str, int]] = {
    "tiny": {},
    "larger": {
        "hidden_size": 256,
        "head_dim": 64,
        "moe_intermediate_size": 192,
        "num_hidden_layers": 4,
        "vocab_size": 8192,
    },
}
KINDS = ("single_turn", "multi_turn")


class ListedBatch:
    """A client whose service has one batch, again and again."""

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        self._by_id = {t.id: t for t in trajectories}

    def lease(self, version: int, *, wait_s: float) -> Any:
        from megatron_fr.trainer.data.client import Lease, LeasedItem

        items = [LeasedItem(t.id, t.id, len(t), t.num_action_tokens, t.reward, 0) for t in self._by_id.values()]
        return Lease("batch", tuple(items), {})

    def fetch(self, ids: Sequence[str]) -> list[Trajectory]:
        return [self._by_id[i] for i in ids]


def make_trajectories(hf_config: Any, kind: str) -> list[Trajectory]:
    """Ragged trajectories with routes."""
    rng = np.random.default_rng(0)
    made = []
    for index in range(BATCH):
        n = int(rng.integers(TOKENS * 3 // 4, TOKENS * 5 // 4))
        mask = np.zeros(n, dtype=np.bool_)
        if kind == "single_turn":
            mask[8:] = True
        else:
            for start in range(n // 8, n, n // 4):
                mask[start : start + n // 8] = True
        shape = (n - 1, hf_config.num_hidden_layers, hf_config.num_experts)
        routes = rng.random(shape).argsort(-1)[..., : hf_config.num_experts_per_tok]
        made.append(
            Trajectory(
                id=str(index),
                prompt_id=str(index),
                group_id=str(index),
                tokens=rng.integers(0, hf_config.vocab_size, n).astype(np.int32),
                action_mask=mask,
                behavior_logprobs=np.where(mask, -np.log(hf_config.vocab_size), 0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                routed_experts=routes.astype(np.uint8),
                reward=float(index % 2),
            )
        )
    return made


def run_config(folder: Path, mode: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "device": "cpu",
            "model": {"path": str(folder), "dtype": "float32"},
            # The same work in every repetition: nothing is rejected, and the weights hardly move.
            "algorithm": {"name": "flash_reinforce", "delta": 100.0},
            "optimizer": {"lr": 1e-9, "schedule": "constant", "warmup_fraction": 0.0},
            "train": {
                "num_updates": 1000,
                "batch_size": BATCH,
                "micro_batch_size": MICRO_BATCH,
                "logprob_mode": mode,
                "logprob_chunk_tokens": 256,
            },
            "reward": {"function": "unused:unused"},
            "data": {"train": "unused.jsonl"},
        }
    )


def floor_step(policy: Any, batches: Sequence[Any]) -> None:
    """One next-token-loss step through the same schedule and optimizer."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    step = policy.step

    def forward(iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[[Any], Any]]:
        batch = next(iterator)
        losses = model(batch.tokens, batch.position_ids, None, labels=batch.targets)
        return losses, lambda values: (values.mean(), {})

    for chunk in step.chunks:
        chunk.zero_grad_buffer()
    step.optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(batches),
        model=list(step.chunks),
        num_microbatches=len(batches),
        seq_length=max(b.tokens.shape[1] for b in batches),
        micro_batch_size=MICRO_BATCH,
        forward_only=False,
    )
    step.schedule.step(1)
    step.optimizer.step()


def run_case(
    root: Path, name: str, kinds: Sequence[str], modes: Sequence[str], repetitions: int, budget_s: float
) -> list[dict[str, Any]]:
    """Some kinds of trajectories and modes of one model."""
    import torch
    from megatron.core import parallel_state

    from megatron_fr.trainer.data.loader import BatchLoader
    from megatron_fr.trainer.distributed import initialize
    from megatron_fr.trainer.policy import build_policy

    device = resolve_device("cpu")
    hf_config = tiny_config()
    for field, value in MODELS[name].items():
        setattr(hf_config, field, value)
    folder = root / name
    save(build_untrained(hf_config), make_tokenizer(), folder)
    rows = []
    initialize(run_config(folder, "keep").parallel, device, seed=1)
    try:
        for mode in modes:
            config = run_config(folder, mode)
            policy = build_policy(config, device)
            for kind in kinds:
                client: Any = ListedBatch(make_trajectories(hf_config, kind))
                loader = BatchLoader(config, policy, client, device.torch_device)

                def ours(policy: Any = policy, loader: Any = loader) -> None:
                    batch = loader.lease(0)
                    assert policy.step.update(batch.micro_batches, batch.constants).stepped

                batch = loader.lease(0)
                floor = partial(floor_step, policy, batch.micro_batches)
                samples = interleave({"floor": floor, "ours": ours}, repetitions, budget_s)
                action_tokens = sum(int(b.action_mask.sum()) for b in batch.micro_batches)
                rows.append(
                    {
                        "model": name,
                        "trajectories": kind,
                        "logprob_mode": mode,
                        "ratio": round(samples["ours"].median_s / samples["floor"].median_s, 3),
                        "ours_s": round(samples["ours"].median_s, 4),
                        "floor_s": round(samples["floor"].median_s, 4),
                        "tokens": batch.num_tokens,
                        "action_tokens": action_tokens,
                        "repetitions": len(samples["ours"].seconds),
                    }
                )
                print(rows[-1], flush=True)
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under 40 s on one thread")
    quick = parser.parse_args().quick
    started = time.monotonic()
    prepare_process(resolve_device("cpu"))
    modes, repetitions, budget_s = (("keep",), 9, 3.0) if quick else (("keep", "recompute"), 25, float("inf"))
    kinds = {"tiny": KINDS, "larger": KINDS[:1] if quick else KINDS}
    with tempfile.TemporaryDirectory() as name:
        cases = [
            row for model in MODELS for row in run_case(Path(name), model, kinds[model], modes, repetitions, budget_s)
        ]
    print(
        json.dumps(
            {
                "benchmark": "step",
                "step_ratio_vs_floor": max(row["ratio"] for row in cases),
                "seconds": round(time.monotonic() - started, 1),
                "cases": cases,
            }
        )
    )


if __name__ == "__main__":
    main()
