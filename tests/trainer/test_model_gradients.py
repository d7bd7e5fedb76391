"""Gradients through Megatron's schedule and gradient buffers against transformers, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.model_ranks import check_gradients
from tests.support.parallel_launch import run_ranks

PLAIN = {"distributed_optimizer": False}
RECOMPUTE = {"recompute": "full"}
LOGITS_AGAIN = {"logprob_mode": "recompute", "logprob_chunk_tokens": 7}

JOBS: dict[str, tuple[int, list[tuple[str, dict[str, Any], dict[str, Any]]]]] = {
    "one process": (
        1,
        [
            ("moe", PLAIN, {}),
            ("moe", PLAIN, RECOMPUTE),
            ("moe_top1", PLAIN, {}),
            ("qwen3", PLAIN, {}),
            ("qwen2_tied", PLAIN, {}),
            ("qwen2_tied", PLAIN, LOGITS_AGAIN),
            ("moe", {}, {}),
        ],
    ),
    "two processes": (
        2,
        [
            ("moe", {"tp": 2, **PLAIN}, {}),
            ("moe", {"tp": 2, **PLAIN}, LOGITS_AGAIN),
            ("qwen2_tied", {"tp": 2, **PLAIN}, LOGITS_AGAIN),
            ("moe", {"tp": 2, "etp": 2, **PLAIN}, RECOMPUTE),
            ("qwen3", {"tp": 2, **PLAIN}, {}),
            ("qwen2_tied", {"tp": 2, "sequence_parallel": True, **PLAIN}, {}),
            ("moe", {"ep": 2, **PLAIN}, {}),
            ("moe_tied", {"pp": 2, **PLAIN}, LOGITS_AGAIN),
            ("qwen2_tied", {"pp": 2, **PLAIN}, {}),
            ("moe", PLAIN, {}),
            ("moe", {"tp": 2}, {}),
            ("moe", {"ep": 2}, {}),
            ("moe_tied", {"pp": 2}, {}),
            ("qwen3", {}, {}),
        ],
    ),
    "four processes": (
        4,
        [("moe", {"tp": 2, "ep": 2, **PLAIN}, {}), ("moe_tied", {"tp": 2, "pp": 2, **PLAIN}, {})],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("world", JOBS)
def test_gradients_equal_transformers_and_the_optimizer_steps(tiny_models: dict[str, Path], world: str) -> None:
    size, cases = JOBS[world]
    jobs = [
        (tiny_models[name], {"world_size": size, **layout}, {"routing_replay": "off", **train})
        for name, layout, train in cases
    ]
    answers = run_ranks(check_gradients, size, jobs=jobs)[0]
    for (name, layout, train), found in zip(cases, answers, strict=True):
        wanted = _reference(tiny_models[name])
        assert found.keys() == wanted.keys()
        if layout.get("distributed_optimizer", True):
            continue  # these are changes of weights; that they are there was checked on the rank
        worst = max(float((found[key] - g).abs().max() / g.abs().max()) for key, g in wanted.items())
        print(f"{name} {layout} {train}: relative error at most {worst:.2g}")
        for key, gradient in wanted.items():
            scale = float(gradient.abs().max())
            error = float((found[key] - gradient).abs().max())
            assert error <= 1e-7 + 1e-4 * scale, f"{name} {layout} {train}: {key} is off by {error:.2g} of {scale:.2g}"


def _reference(folder: Path) -> dict[str, torch.Tensor]:
    """transformers' gradients under the names of its files (it keeps experts fused in memory)."""
    from transformers import AutoModelForCausalLM

    batch = torch.load(folder / "batch.pt")
    ids, mask = batch["ids"], batch["mask"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logprobs = model(ids, attention_mask=mask.long()).logits[:, :-1].log_softmax(-1)
    chosen = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    (-chosen[mask[:, 1:]].mean()).backward()
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        if name.endswith("experts.gate_up_proj"):
            for expert, fused in enumerate(parameter.grad):
                gate, up = fused.chunk(2)
                prefix = name.replace("gate_up_proj", str(expert))
                gradients[f"{prefix}.gate_proj.weight"], gradients[f"{prefix}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(parameter.grad):
                gradients[f"{name.replace('down_proj', str(expert))}.down_proj.weight"] = down
        else:
            gradients[name] = parameter.grad
    return gradients
