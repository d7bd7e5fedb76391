"""The Megatron model against transformers, and its weights there and back, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.model_ranks import check_bfloat16, check_models, mean_next_token_error
from tests.support.parallel_launch import run_ranks

Answers = list[list[dict[str, Any]]]
DENSE = ("qwen3", "qwen3_tied", "qwen2", "qwen2_tied")
MOE = ("moe", "moe_tied")
GLM = ("glm", "glm_plain")

#: One set of processes each: (world size, [(layout, models)]).
LAYOUTS: dict[str, tuple[int, list[tuple[dict[str, int], tuple[str, ...]]]]] = {
    "one process": (1, [({}, ("moe_unnormed", "moe_top1", "moe_mixed", *GLM, *MOE, *DENSE))]),
    "two processes": (
        2,
        [
            ({"tp": 2}, (*GLM, *MOE, *DENSE)),
            ({"tp": 2, "etp": 2}, MOE),
            ({"ep": 2}, (*GLM, *MOE, "moe_top1")),
            ({"pp": 2}, (*GLM, *MOE, *DENSE)),
            ({}, ("moe", "qwen2")),
        ],
    ),
    "four processes": (
        4,
        [
            ({"tp": 2, "ep": 2}, ("glm", *MOE, "moe_mixed")),
            ({"tp": 2, "pp": 2}, ("moe_tied", "qwen3_tied", "qwen2")),
            ({"pp": 2, "ep": 2}, ("moe", "moe_mixed")),
            ({"ep": 4}, ("moe", "moe_mixed")),
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("world", LAYOUTS)
def test_log_probabilities_equal_transformers_and_the_round_trip_is_bit_exact(
    tiny_models: dict[str, Path], tmp_path: Path, world: str
) -> None:
    size, layouts = LAYOUTS[world]
    jobs = [
        (tiny_models[name], {"world_size": size, **layout}, tmp_path / f"{i}-{name}")
        for i, (layout, names) in enumerate(layouts)
        for name in names
    ]
    by_rank: Answers = run_ranks(check_models, size, jobs=jobs)
    for i, (folder, layout, out) in enumerate(jobs):
        answers = [answers[i] for answers in by_rank]
        differences = [answer["difference"] for answer in answers if "difference" in answer]
        print(f"{folder.name} {layout}: {max(differences):.2g}")
        assert differences, f"no rank gave logits: {folder.name} {layout}"
        assert max(differences) < 1e-4, f"{folder.name} {layout}"
        assert answers[0]["wrong"] == [], f"{folder.name} {layout}"
        assert_folder_is_complete(folder, out)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "moe", "glm"])
def test_bfloat16_is_no_further_from_float32_than_transformers_is(tiny_models: dict[str, Path], name: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_models[name]
    batch = torch.load(folder / "batch.pt")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        logits = model(batch["ids"], attention_mask=batch["mask"].long()).logits.float()
    theirs = mean_next_token_error(logits.log_softmax(-1), batch)
    ours = run_ranks(check_bfloat16, 2, folder=folder, parallel={"world_size": 2, "tp": 2})[0]
    print(f"{name}: {ours:.2g}, transformers {theirs:.2g}")
    assert 0 < ours < 2 * theirs


def assert_folder_is_complete(source: Path, out: Path) -> None:
    """The written folder loads in transformers, tokenizer and all, and answers as the source does."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = {file.name for file in out.glob("*.safetensors")}
    assert len(weights) > 1
    others = {file.name for file in source.iterdir()} - {"model.safetensors", "batch.pt"}
    assert {file.name for file in out.iterdir()} == others | weights | {"model.safetensors.index.json"}
    batch = torch.load(source / "batch.pt")
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval()
    assert model.dtype == torch.float32
    with torch.no_grad():
        logprobs = model(batch["ids"], attention_mask=batch["mask"].long()).logits.log_softmax(-1)
    assert torch.equal(logprobs, batch["logprobs"])
    assert len(AutoTokenizer.from_pretrained(out)) == len(AutoTokenizer.from_pretrained(source))
