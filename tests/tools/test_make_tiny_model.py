"""The tiny models: untrained folders, the warm-up, and the command-line tool."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_fr.agents.arithmetic import questions
from megatron_fr.rollout.prompts import load_prompts
from tests.support.tiny_policy import LocalSampler, evaluate_policy
from tools.tiny import make_untrained
from tools.tiny.build import MANIFEST, cached_folder, make_tiny_model
from tools.tiny.traces import trace
from tools.tiny.warmup import Recipe, encode_trace

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "make_tiny_model.py"


def load(folder: Path) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


@pytest.mark.parametrize(
    ("options", "architecture", "biased"),
    [
        ({}, "Qwen3MoeForCausalLM", False),
        ({"num_layers": 3, "num_experts": 4, "tie": True, "vocab_size": 522}, "Qwen3MoeForCausalLM", False),
        ({"dense": True}, "Qwen2ForCausalLM", True),
        ({"family": "qwen3", "tie": True}, "Qwen3ForCausalLM", False),
    ],
)
def test_untrained_models_are_complete_folders(
    tmp_path: Path, options: dict[str, Any], architecture: str, biased: bool
) -> None:
    model = load(make_untrained(tmp_path / "m", **options))
    config = model.config
    assert config.architectures == [architecture]
    assert config.num_hidden_layers == options.get("num_layers", 2)
    assert config.vocab_size == options.get("vocab_size", 514)
    assert config.vocab_size % 2 == 0
    assert config.vocab_size % 128
    assert model.dtype == torch.float32
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (embeddings is head) == options.get("tie", False)
    attention = model.model.layers[0].self_attn
    assert (attention.q_proj.bias is not None) == biased
    for name, parameter in model.named_parameters():
        assert parameter.std() > 0, f"{name} is constant, so a mistake in mapping it could not be seen"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert len(tokenizer) < config.vocab_size
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.chat_template


def test_sizes_of_the_moe_are_all_different(tmp_path: Path) -> None:
    config = load(make_untrained(tmp_path / "m")).config
    sizes = [config.hidden_size, config.num_attention_heads * config.head_dim, config.moe_intermediate_size]
    sizes += [config.num_key_value_heads * config.head_dim, config.vocab_size, config.num_experts]
    assert len(set(sizes)) == len(sizes)
    assert config.head_dim != config.hidden_size // config.num_attention_heads
    assert config.norm_topk_prob
    assert config.num_experts_per_tok == 2


def test_the_same_seed_gives_the_same_files_and_another_seed_other_weights(tmp_path: Path) -> None:
    folders = [make_untrained(tmp_path / str(i), seed=seed) for i, seed in enumerate((0, 0, 1))]
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1] != weights[2]
    assert len({(folder / "tokenizer.json").read_bytes() for folder in folders}) == 1


def test_a_vocabulary_below_the_tokenizers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab_size=128 is below"):
        make_untrained(tmp_path / "m", vocab_size=128)


def test_digits_are_single_tokens_and_any_text_survives(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_untrained(tmp_path / "m"))
    text = "x = 1234567\nπ ≈ 3.14159 \t🙂"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode(i) for i in tokenizer("90210", add_special_tokens=False)["input_ids"]] == list("90210")


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.make_tiny_model", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def run_tool_here(*arguments: str) -> str:
    """Its output; its imports take most of the time of such a call."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", [str(TOOL), *arguments])
        runpy.run_path(str(TOOL), run_name="__main__")
    return said.getvalue()


@pytest.mark.slow
def test_the_tool_writes_a_complete_folder_once(tmp_path: Path) -> None:
    out = tmp_path / "tiny"
    arguments = [str(out), "--steps", "3", "--prompts", "20", "--eval-prompts", "8"]
    first = run_tool(*arguments)
    assert first.returncode == 0, first.stderr
    assert "warm-up 3/3: loss" in first.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"], "the work folder is gone"
    load(out)
    train, held_out = load_prompts(out / "train.jsonl"), load_prompts(out / "eval.jsonl")
    assert (len(train), len(held_out)) == (20, 8)
    assert not {p.id for p in train} & {p.id for p in held_out}
    stamp = (out / "model.safetensors").stat().st_mtime_ns
    assert "is complete" in run_tool_here(*arguments)
    assert (out / "model.safetensors").stat().st_mtime_ns == stamp
    manifest = json.loads((out / MANIFEST).read_text())
    assert "another recipe" in run_tool_here(*[a if a != "3" else "2" for a in arguments])
    assert json.loads((out / MANIFEST).read_text())["recipe"] != manifest["recipe"]
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_without_a_folder_the_model_is_kept_in_the_cache_under_its_recipes_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_FR_CACHE", str(tmp_path))
    sizes = ["--prompts", "20", "--eval-prompts", "8"]
    folders = {run_tool_here("--steps", steps, *sizes) for steps in ("1", "1", "2")}
    assert {Path(text.strip()) for text in folders} == set(tmp_path.iterdir())
    assert len(folders) == 2


def test_the_same_recipe_gives_the_same_policy(tmp_path: Path) -> None:
    recipe = Recipe(steps=3, batch=8)
    folders = [make_tiny_model(tmp_path / name, recipe=recipe, num_train=5, num_eval=5) for name in "ab"]
    for name in ("model.safetensors", "tokenizer.json", "train.jsonl", "eval.jsonl"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


@pytest.mark.slow
def test_the_tool_leaves_a_folder_of_somebody_else_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    done = run_tool(str(tmp_path), "--steps", "1")
    assert done.returncode == 1
    assert "is no tiny model folder" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_sampling_in_a_batch_gives_each_conversation_its_own_continuation(tmp_path: Path) -> None:
    """A nearly deterministic model continues each prompt as it does alone, whatever shares its batch."""
    model = load(make_untrained(tmp_path / "m"))
    with torch.no_grad():
        model.lm_head.weight *= 100
    prompts = [[5, 9, 11], [7] * 9, [3, 1]]

    async def main(together: bool) -> list[list[int]]:
        async with LocalSampler(model, 0) as sampler:
            if together:
                return list(await asyncio.gather(*(sampler.sample(p, [], 6) for p in prompts)))
            return [await sampler.sample(p, [], 6) for p in prompts]

    alone = asyncio.run(main(False))
    assert asyncio.run(main(True)) == alone
    stop = alone[0][2]

    async def stopped() -> list[int]:
        async with LocalSampler(model, 0) as sampler:
            return await sampler.sample(prompts[0], [stop], 6)

    assert asyncio.run(stopped()) == alone[0][: alone[0].index(stop) + 1]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_warmed_up_policy_solves_two_fifths_and_copies_numbers_nearly_perfectly() -> None:
    out = make_tiny_model(cached_folder())  # the one that launch/local.sh trains
    model, tokenizer = load(out), AutoTokenizer.from_pretrained(out)
    measured = evaluate_policy(model, tokenizer, out / "eval.jsonl", 256)
    assert 0.3 <= measured["reward"] <= 0.52  # 0.42 with a standard error of 0.03
    assert measured["share_other"] < 0.03
    for way in ("guessed", "stopped_early", "broken_code"):
        assert measured[f"share_{way}"] > 0.05
    assert measured["tokens_mean"] < 160
    assert copying(model, tokenizer) > 0.97


def copying(model: Any, tokenizer: Any) -> float:
    """Mean probability of a whole right solution, given its decisions: the choices between ways are left out."""
    source = questions(123, held_out=True)
    chances = []
    decisions = {
        tokenizer.convert_tokens_to_ids("<tool_call>"),
        *tokenizer(')"}}', add_special_tokens=False)["input_ids"],
    }
    for _ in range(50):
        ids, mask = encode_trace(tokenizer, trace(next(source), "solve", random.Random(0)))
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        kept = [t for t in range(1, len(ids)) if mask[t] and ids[t] not in decisions]
        chances.append(sum(logprobs[t - 1, ids[t]].item() for t in kept))
    return torch.tensor(chances).exp().mean().item()
