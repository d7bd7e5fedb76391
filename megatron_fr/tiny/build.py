"""Build a warmed-up tiny policy and its prompts as one complete folder."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_fr.agents import arithmetic, python_schema
from megatron_fr.agents.contract import RewardInput
from megatron_fr.agents.python_tool import PythonToolAgent
from megatron_fr.config import AgentConfig
from megatron_fr.rollout.prompts import load_prompts
from megatron_fr.tiny.model import save, tiny_config
from megatron_fr.tiny.sampling import LocalSampler, sample_all
from megatron_fr.tiny.tokenizer import make_tokenizer
from megatron_fr.tiny.warmup import Recipe, warm_up

MANIFEST = "tiny_manifest.json"
MAX_NEW_TOKENS = 96


def make_tiny_model(
    out_dir: str | Path,
    *,
    recipe: Recipe | None = None,
    num_train: int = 2000,
    num_eval: int = 256,
    evaluate: int = 128,
    report: Callable[[str], None] = print,
) -> Path:
    """Write a tiny Qwen3-MoE policy that solves about two fifths of the arithmetic task, with its prompts.

    The folder holds the model, the tokenizer, ``train.jsonl`` and ``eval.jsonl`` (disjoint questions) and a manifest.
    A folder that the same recipe completed is left as it is. It is written beside and renamed: whole or absent.

    Args:
        recipe: of the warm-up.
        num_train: prompts in ``train.jsonl``.
        num_eval: prompts in ``eval.jsonl``, from the held-out questions.
        evaluate: held-out prompts to sample after the warm-up; 0 leaves the evaluation out.
        report: takes progress lines.

    Raises:
        FileExistsError: ``out_dir`` exists and was not written by this function.
    """
    recipe = recipe or Recipe()
    out = Path(out_dir).absolute()
    key = _hash(recipe, num_train, num_eval)
    manifest = out / MANIFEST
    if manifest.is_file():
        if json.loads(manifest.read_text())["recipe"] == key:
            report(f"{out} is complete")
            return out
        report(f"{out} was made by another recipe: making it anew")
    elif out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} exists and is no tiny model folder; give another path")
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        measured = _fill(work, recipe, num_train, num_eval, evaluate, report)
        (work / MANIFEST).write_text(
            json.dumps({"recipe": key, "warmup": asdict(recipe), "measured": measured}, indent=1)
        )
        work.chmod(0o755)
        _replace(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def cached_folder(recipe: Recipe | None = None, num_train: int = 2000, num_eval: int = 256) -> Path:
    """Where this machine keeps the model of a recipe: under ``$MEGATRON_FR_CACHE``, by default ~/.cache/megatron-fr."""
    root = os.environ.get("MEGATRON_FR_CACHE") or Path.home() / ".cache/megatron-fr"
    return Path(root) / f"tiny-{_hash(recipe or Recipe(), num_train, num_eval)[:12]}"


def evaluate_policy(
    model: Any, tokenizer: Any, prompts_file: Path, num_prompts: int, *, seed: int = 0
) -> dict[str, float]:
    """Sample one conversation of each of the first prompts at temperature 1, with the real tool and reward.

    Returns:
        ``reward``, ``tool_calls``, ``tool_errors``, mean and largest token count, and under ``share_*`` how the
        conversations went: solved, guessed without the tool, stopped early, broken code, other.
    """
    return asyncio.run(_evaluate(model, tokenizer, prompts_file, num_prompts, seed))


async def _evaluate(model: Any, tokenizer: Any, prompts_file: Path, num_prompts: int, seed: int) -> dict[str, float]:
    prompts = load_prompts(prompts_file)[:num_prompts]
    agent = PythonToolAgent(tokenizer, AgentConfig(max_turns=4))
    await agent.start()
    try:
        async with LocalSampler(model, tokenizer.pad_token_id, seed=seed) as sampler:
            results = await sample_all(agent, sampler, prompts, MAX_NEW_TOKENS)
    finally:
        await agent.stop()
    ways: Counter[str] = Counter()
    rewards = []
    for prompt, (outcome, _) in zip(prompts, results, strict=True):
        last = outcome.messages[-1]
        final = str(last["content"]) if last["role"] == "assistant" else ""
        counts = outcome.num_tool_calls, outcome.num_tool_errors
        episode = RewardInput(prompt, outcome.messages, final, outcome.finish_reason, *counts)
        parts = arithmetic.exact_answer(episode)
        rewards.append(parts["reward"])
        ways[_way(parts, *counts)] += 1
    total = len(prompts)
    lengths = [length for _, length in results]
    return {
        "reward": sum(rewards) / total,
        "tool_calls": sum(outcome.num_tool_calls for outcome, _ in results) / total,
        "tool_errors": sum(outcome.num_tool_errors for outcome, _ in results) / total,
        "tokens_mean": sum(lengths) / total,
        "tokens_max": max(lengths),
        **{f"share_{way}": ways[way] / total for way in ("solved", "guessed", "stopped_early", "broken_code", "other")},
    }


def _way(parts: dict[str, float], calls: int, errors: int) -> str:
    if parts["reward"]:
        return "solved"
    if not calls and parts["answered"]:
        return "guessed"
    if parts["stopped_early"]:
        return "stopped_early"
    return "broken_code" if errors else "other"


def _fill(
    work: Path, recipe: Recipe, num_train: int, num_eval: int, evaluate: int, report: Callable[[str], None]
) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    _write_prompts(work / "train.jsonl", arithmetic.questions(recipe.seed + 2), num_train)
    _write_prompts(work / "eval.jsonl", arithmetic.questions(recipe.seed + 3, held_out=True), num_eval)
    tokenizer = make_tokenizer()
    torch.manual_seed(recipe.seed)
    model = AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.float32)
    warm_up(model, tokenizer, recipe, report)
    save(model, tokenizer, work)
    if not evaluate:
        return {}
    measured = evaluate_policy(model, tokenizer, work / "eval.jsonl", evaluate, seed=recipe.seed)
    report("held out: " + ", ".join(f"{name} {value:.3f}" for name, value in measured.items()))
    return measured


def _write_prompts(path: Path, source: Any, count: int) -> None:
    lines = [json.dumps(question.record()) for question in itertools.islice(source, count)]
    path.write_text("".join(line + "\n" for line in lines))


def _hash(recipe: Recipe, num_train: int, num_eval: int) -> str:
    """Of the numbers and of the code that the result depends on."""
    digest = hashlib.sha256(json.dumps([asdict(recipe), num_train, num_eval], sort_keys=True).encode())
    sources = [Path(__file__).with_name(f"{name}.py") for name in ("model", "tokenizer", "traces", "warmup")]
    for source in (*sources, Path(arithmetic.__file__), Path(python_schema.__file__)):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _replace(work: Path, out: Path) -> None:
    """Rename ``work`` to ``out``; an old folder of ours makes room first."""
    if out.exists():
        old = work.with_name(work.name + ".old")
        os.rename(out, old)
        os.rename(work, out)
        shutil.rmtree(old)
    else:
        os.rename(work, out)
