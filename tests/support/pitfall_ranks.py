"""What the ranks of the update's pitfall tests do: whole updates with the trainer's own pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_fr.algorithm import RewardBatch
from megatron_fr.config import RunConfig
from megatron_fr.trajectory import NO_VERSION, Trajectory, decode


def make_batch(vocab: int, layers: int, top_k: int, experts: int, *, behavior: float) -> list[Trajectory]:
    """Five random trajectories; ``behavior`` is every action token's log-probability."""
    generator = np.random.default_rng(0)
    made = []
    for index, length in enumerate((9, 20, 14, 26, 11)):
        mask = np.arange(length) >= 4
        scores = generator.random((length - 1, layers, experts))
        made.append(
            Trajectory(
                id=f"t{index}",
                prompt_id=f"p{index}",
                group_id=f"t{index}",
                tokens=generator.integers(0, vocab, length).astype(np.int32),
                action_mask=mask,
                behavior_logprobs=np.where(mask, behavior, 0).astype(np.float32),
                versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
                reward=float(index % 2),
                routed_experts=scores.argsort(-1)[..., :top_k].astype(np.uint8),
            )
        )
    return made


def observe_updates(folder: Path, own_routes: Path) -> dict[str, Any]:
    """One policy, four batches: two where all rows are rejected, one of equal rewards, and a sound one.

    Args:
        own_routes: ``batch.npz`` with the second of them, whose routes are those that the model itself chooses.
    """
    from megatron_fr.runtime.device import resolve_device
    from megatron_fr.trainer import distributed

    config = RunConfig.model_validate(
        {
            "model": {"path": str(folder), "dtype": "float32"},
            "train": {"num_updates": 4, "batch_size": 5, "micro_batch_size": 2, "recompute": "full"},
            "algorithm": {"name": "flash_reinforce", "delta": 1e-3},
            "optimizer": {"lr": 1e-2, "weight_decay": 0.1, "schedule": "constant", "warmup_fraction": 0.0},
            "reward": {"function": "unused:unused"},
            "data": {"train": "unused.jsonl"},
        }
    )
    device = resolve_device("cpu")
    distributed.initialize(config.parallel, device, seed=1, timeout_s=60)
    from megatron.core import parallel_state

    from megatron_fr.trainer.data.batch import build_micro_batch
    from megatron_fr.trainer.objective import BatchConstants
    from megatron_fr.trainer.policy import build_policy

    policy = build_policy(config, device)
    step, shape = policy.step, policy.route_shape
    assert shape is not None
    sizes = (policy.spec.vocab, len(shape.columns), shape.top_k, shape.num_experts)

    def weights() -> dict[str, torch.Tensor]:
        return {n: t.clone() for n, t in policy.hf_tensors() if t is not None}

    def parts(trajectories: list[Trajectory]) -> tuple[list[Any], BatchConstants]:
        advantages, signal = step.objective.advantages(
            RewardBatch(torch.tensor([t.reward for t in trajectories]), [t.group_id for t in trajectories])
        )
        assert signal
        split = [[0, 1], [2, 3], [4]]
        batches = [
            build_micro_batch(
                [trajectories[i] for i in part],
                [advantages[i] for i in part],
                layout=policy.layout,
                route_shape=shape,
            )
            for part in split
        ]
        return batches, BatchConstants(len(trajectories), sum(t.num_action_tokens for t in trajectories))

    answer: dict[str, Any] = {"before": weights()}
    rejected = step.update(*parts(make_batch(*sizes, behavior=-0.01)))
    answer["rejected"] = {"stepped": rejected.stepped, "metrics": rejected.metrics, "weights": weights()}
    answer["own_routes"] = step.update(*parts(decode(own_routes.read_bytes())), check_replay=True).metrics
    answer["signal_of_equal_rewards"] = step.objective.advantages(RewardBatch(torch.ones(5), list("abcde")))[1]
    step.skip()
    answer["skipped_weights"] = weights()

    # On policy: behavior as the trainer's own forward gives it, with the same routes.
    sound = make_batch(*sizes, behavior=-1.0)
    batches, constants = parts(sound)
    for batch, logprobs in zip(batches, step.logprobs(batches), strict=True):
        batch.behavior_logprobs = torch.where(batch.action_mask, logprobs, 0.0)
    forwards: list[Any] = []
    policy.chunks[0].register_forward_pre_hook(lambda *_: forwards.append(1))
    report = step.update(batches, constants)
    routers = {
        name: float(p.main_grad.abs().max())
        for name, p in step.chunks[0].named_parameters()
        if name.endswith("router.weight")
    }
    answer["sound"] = {
        "stepped": report.stepped,
        "forwards": len(forwards),
        "micro_batches": len(batches),
        "metrics": report.metrics,
        "router_gradients": routers,
        "weights": weights(),
    }
    answer["groups"] = [
        (group["wd_mult"], sum(p.numel() for p in group["params"])) for group in step.optimizer.param_groups
    ]
    answer["exempt_numel"] = sum(p.numel() for p in step.chunks[0].parameters() if p.ndim == 1)
    answer["all_numel"] = sum(p.numel() for p in step.chunks[0].parameters())
    parallel_state.destroy_model_parallel()
    return answer


def observe_faults(folder: Path) -> dict[str, Any]:
    """Two data-parallel ranks; only the second one's data or gradients go wrong.

    Returns:
        by kind of fault: the error on this rank, and whether every weight is what it was.
    """
    from megatron_fr.errors import UpdateError
    from megatron_fr.runtime.device import resolve_device
    from megatron_fr.trainer import distributed

    config = RunConfig.model_validate(
        {
            "model": {"path": str(folder), "dtype": "float32"},
            "parallel": {"world_size": 2},
            "train": {"num_updates": 4, "batch_size": 6, "micro_batch_size": 2},
            "algorithm": {"name": "flash_reinforce", "admission": "off"},
            "optimizer": {"lr": 1e-2, "schedule": "constant", "warmup_fraction": 0.0},
            "reward": {"function": "unused:unused"},
            "data": {"train": "unused.jsonl"},
        }
    )
    device = resolve_device("cpu")
    rank = distributed.initialize(config.parallel, device, seed=1, timeout_s=60).rank
    from megatron.core import parallel_state

    from megatron_fr.trainer.data.batch import build_micro_batch
    from megatron_fr.trainer.objective import BatchConstants
    from megatron_fr.trainer.policy import build_policy

    policy = build_policy(config, device)
    step, shape = policy.step, policy.route_shape
    assert shape is not None
    sizes = (policy.spec.vocab, len(shape.columns), shape.top_k, shape.num_experts)

    def weights() -> list[torch.Tensor]:
        return [p.detach().clone() for chunk in policy.chunks for p in chunk.parameters()]

    def attempt(behavior: float) -> dict[str, Any]:
        made = make_batch(*sizes, behavior=behavior)
        batches = [
            build_micro_batch([made[i] for i in part], [0.5] * len(part), layout=policy.layout, route_shape=shape)
            for part in ([0, 1], [2, 3])
        ]
        before = weights()
        message = ""
        try:
            step.update(batches, BatchConstants(8, 100))
        except UpdateError as error:
            message = str(error)
        return {"error": message, "unchanged": all(map(torch.equal, before, weights()))}

    answer = {"ratio": attempt(-200.0 if rank == 1 else -1.0)}
    poison = next(iter(policy.chunks[0].parameters())).register_hook(
        lambda grad: grad * float("nan") if rank == 1 else grad
    )
    answer["gradient"] = attempt(-1.0)
    poison.remove()
    answer["norm"] = attempt(-60.0)  # ratios around e^54: finite, and so is each gradient, but not their squares' sum
    answer["sound"] = attempt(-1.0)
    with torch.no_grad():
        policy.chunks[0].decoder.final_layernorm.weight.fill_(float("nan"))
    answer["weights"] = attempt(-1.0)
    parallel_state.destroy_model_parallel()
    return answer


def observe_steps(folder: Path) -> dict[str, Any]:
    """GRPO with two optimizer steps on one batch, and the same two steps taken one by one.

    Returns:
        the weights after each way, and the metrics of the first.
    """
    from dataclasses import replace

    from megatron_fr.runtime.device import resolve_device
    from megatron_fr.trainer import distributed

    config = RunConfig.model_validate(
        {
            "model": {"path": str(folder), "dtype": "float32"},
            "train": {"num_updates": 4, "batch_size": 5, "micro_batch_size": 2},
            "algorithm": {"name": "grpo", "group_size": 5, "steps": 2},
            "optimizer": {"lr": 3e-2, "schedule": "constant", "warmup_fraction": 0.0},
            "reward": {"function": "unused:unused"},
            "data": {"train": "unused.jsonl"},
        }
    )
    device = resolve_device("cpu")
    distributed.initialize(config.parallel, device, seed=1, timeout_s=60)
    from megatron.core import parallel_state

    from megatron_fr.trainer.data.batch import build_micro_batch
    from megatron_fr.trainer.objective import BatchConstants
    from megatron_fr.trainer.policy import build_policy

    answer: dict[str, Any] = {}
    for way in ("together", "one by one"):
        policy = build_policy(config, device)
        step, shape = policy.step, policy.route_shape
        assert shape is not None
        made = make_batch(policy.spec.vocab, len(shape.columns), shape.top_k, shape.num_experts, behavior=-1.0)
        advantages = [1.0, -1.0, 0.5, -0.7, 0.2]
        batches = [
            build_micro_batch(
                [made[i] for i in part], [advantages[i] for i in part], layout=policy.layout, route_shape=shape
            )
            for part in ([0, 1], [2, 3], [4])
        ]
        constants = BatchConstants(5, sum(t.num_action_tokens for t in made))
        if way == "together":
            answer["metrics"] = step.update(batches, constants).metrics
        else:
            step.objective.steps = 1
            before = step.logprobs(batches)
            step.update(batches, constants)
            step.update([replace(b, old_logprobs=old) for b, old in zip(batches, before, strict=True)], constants)
        answer[way] = {name: tensor.clone() for name, tensor in policy.hf_tensors() if tensor is not None}
    parallel_state.destroy_model_parallel()
    return answer
