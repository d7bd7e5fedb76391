"""Counts of the plan against built models, and the published models on the meta device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from parallel_launch import run_ranks
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from megatron_fr.bridge import hf_tensor_specs, read_hf_config
from megatron_fr.cli import main
from megatron_fr.config import RunConfig
from megatron_fr.config.sections import ParallelConfig
from megatron_fr.plan import count_parameters, legal_layouts
from megatron_fr.tiny import make_untrained

DENSE: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 28}
SMALL = DENSE | {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
#: The models' published configurations, as far as they decide shapes.
PUBLISHED = {
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
    "Qwen2.5-7B-Instruct": Qwen2Config(
        **DENSE,
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    ),
    "Qwen2.5-Math-1.5B": Qwen2Config(**SMALL, vocab_size=151936, tie_word_embeddings=True),
    "DeepSeek-R1-Distill-Qwen-1.5B": Qwen2Config(**SMALL, vocab_size=151936, tie_word_embeddings=False),
}
COUNTS = {
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen2.5-Math-1.5B": 1_543_714_304,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_map_without_a_leftover_or_missing_tensor(name: str) -> None:
    config = PUBLISHED[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    specs = {spec.name: spec.shape for spec in hf_tensor_specs(config, torch.bfloat16)}
    assert sum(torch.Size(shape).numel() for shape in specs.values()) == COUNTS[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[name]
    ours = {key: shape for key, shape in specs.items() if ".mlp.experts." not in key}
    theirs = {key: tuple(p.shape) for key, p in model.named_parameters() if ".mlp.experts." not in key}
    assert ours == theirs
    assert sum(count_parameters(config, ParallelConfig(), 0)) == COUNTS[name]


def counted_and_built(jobs: list[tuple[Path, dict[str, int]]]) -> list[tuple[int, int]]:
    from megatron_fr.device import resolve_device
    from megatron_fr.trainer import distributed

    answers = []
    for folder, layout in jobs:
        config = RunConfig.model_validate(
            {
                "model": {"path": str(folder), "dtype": "float32"},
                "parallel": {"world_size": 2, **layout},
                "train": {"num_updates": 1, "batch_size": 2},
                "reward": {"function": "unused:unused"},
                "data": {"train": "unused.jsonl"},
            }
        )
        device = resolve_device("cpu")
        distributed.initialize(config.parallel, device, seed=1, timeout_s=60)
        from megatron.core import parallel_state

        from megatron_fr.trainer.model import build_model

        hf_config = read_hf_config(folder)
        chunks = build_model(hf_config, config, device)
        built = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
        stage = parallel_state.get_pipeline_model_parallel_rank()
        answers.append((sum(count_parameters(hf_config, config.parallel, stage)), built))
        parallel_state.destroy_model_parallel()
    return answers


@pytest.mark.slow
def test_counts_equal_those_of_built_models_on_every_rank(tmp_path: Path) -> None:
    moe = make_untrained(tmp_path / "moe", vocab_size=515)
    tied = make_untrained(tmp_path / "tied", family="qwen2", tie=True, vocab_size=515)
    jobs = [
        (moe, {"tensor": 2}),
        (moe, {"expert": 2}),
        (moe, {"pipeline": 2}),
        (moe, {"tensor": 2, "expert_tensor": 2}),
        (tied, {"tensor": 2}),
        (tied, {"pipeline": 2}),
    ]
    for answers in run_ranks(counted_and_built, 2, jobs=jobs):
        for job, (counted, built) in zip(jobs, answers, strict=True):
            assert counted == built, job


def test_every_layout_listed_divides_the_model_and_the_ranks() -> None:
    layouts = list(legal_layouts(PUBLISHED["Qwen3-30B-A3B"], 16))
    assert any((p.tensor, p.expert, p.pipeline) == (4, 8, 2) for p in layouts)
    assert all(4 % p.tensor == 0 and 48 % p.pipeline == 0 and 128 % p.expert == 0 for p in layouts)


def test_the_command_prints_each_layout_and_whether_it_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    PUBLISHED["Qwen3-30B-A3B"].save_pretrained(tmp_path / "model")
    run = {
        "model": {"path": str(tmp_path / "model")},
        "train": {"num_updates": 1, "batch_size": 128, "micro_batch_size": 1, "recompute": "full"},
        "reward": {"function": "unused:unused"},
        "data": {"train": "unused.jsonl"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    assert main(["plan", "--config", str(tmp_path / "run.yaml"), "--gpus", "8", "--gpu-memory", "80"]) == 0
    text = capsys.readouterr().out
    assert "30,532,122,624 parameters" in text
    assert "weight sync: 61.06 GB" in text
    verdicts = {line.split()[-1] for line in text.splitlines() if line.split()[-1] in ("yes", "no")}
    assert verdicts == {"yes", "no"}
