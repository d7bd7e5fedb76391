"""Build a warmed-up tiny policy and its prompts as one complete folder."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_fr.agents import arithmetic, tool_call
from tools.tiny.model import save, tiny_config
from tools.tiny.tokenizer import make_tokenizer
from tools.tiny.warmup import Recipe, warm_up

MANIFEST = "tiny_manifest.json"


def make_tiny_model(
    out_dir: str | Path,
    *,
    recipe: Recipe | None = None,
    num_train: int = 2000,
    num_eval: int = 256,
    report: Callable[[str], None] = print,
) -> Path:
    """Write a tiny Qwen3-MoE policy that solves about two fifths of the arithmetic task, with its prompts.

    The folder holds model, tokenizer, ``train.jsonl``, ``eval.jsonl`` (disjoint questions) and a manifest. It appears
    when it is complete. A folder that the same recipe completed is left as it is.

    Args:
        recipe: the warm-up.
        num_train: prompts in ``train.jsonl``.
        num_eval: prompts in ``eval.jsonl``, from the held-out questions.
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
        _fill(work, recipe, num_train, num_eval, report)
        (work / MANIFEST).write_text(json.dumps({"recipe": key, "warmup": asdict(recipe)}, indent=1))
        work.chmod(0o755)
        if out.exists():
            os.rename(out, work / ".old")
        os.rename(work, out)
        shutil.rmtree(out / ".old", ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def cached_folder(recipe: Recipe | None = None, num_train: int = 2000, num_eval: int = 256) -> Path:
    """Where this machine keeps the model of a recipe: under ``$MEGATRON_FR_CACHE``, by default ~/.cache/megatron-fr."""
    root = os.environ.get("MEGATRON_FR_CACHE") or Path.home() / ".cache/megatron-fr"
    return Path(root) / f"tiny-{_hash(recipe or Recipe(), num_train, num_eval)[:12]}"


def _fill(work: Path, recipe: Recipe, num_train: int, num_eval: int, report: Callable[[str], None]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    _write_prompts(work / "train.jsonl", arithmetic.questions(recipe.seed + 2), num_train)
    _write_prompts(work / "eval.jsonl", arithmetic.questions(recipe.seed + 3, held_out=True), num_eval)
    tokenizer = make_tokenizer()
    torch.manual_seed(recipe.seed)
    model = AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.float32)
    warm_up(model, tokenizer, recipe, report)
    save(model, tokenizer, work)


def _write_prompts(path: Path, source: Any, count: int) -> None:
    path.write_text("".join(json.dumps(question.record()) + "\n" for question in itertools.islice(source, count)))


def _hash(recipe: Recipe, num_train: int, num_eval: int) -> str:
    """Hash of the numbers and of the code that the result depends on."""
    digest = hashlib.sha256(json.dumps([asdict(recipe), num_train, num_eval], sort_keys=True).encode())
    sources = [Path(__file__).with_name(f"{name}.py") for name in ("model", "tokenizer", "traces", "warmup")]
    for source in (*sources, Path(arithmetic.__file__), Path(tool_call.__file__)):
        digest.update(source.read_bytes())
    return digest.hexdigest()
