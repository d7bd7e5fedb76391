"""Short supervised warm-up that gives the tiny policy a mixture of behaviours, one of them right."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_fr.agents.arithmetic import questions
from megatron_fr.agents.tool_call import PYTHON_TOOL_SCHEMA
from tools.tiny.traces import MODES, Message, Mode, trace


@dataclass(frozen=True)
class Recipe:
    """What the warm-up does; its hash names the result."""

    seed: int = 0
    steps: int = 450
    batch: int = 48
    lr: float = 3e-3
    warmup_steps: int = 50
    shares: dict[Mode, float] = field(
        default_factory=lambda: {"solve": 0.42, "guess": 0.25, "stop_early": 0.2, "broken_code": 0.13}
    )


def encode_trace(tokenizer: Any, messages: list[Message]) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation up to its last stop token, and which of them the assistant wrote.

    As in a rollout, the assistant's turns are tokenised apart from the text around them.
    """
    text = tokenizer.apply_chat_template(messages, tools=[PYTHON_TOOL_SCHEMA], tokenize=False)
    opening = "<|im_start|>assistant\n"
    ids: list[int] = []
    mask: list[bool] = []
    head, *turns = text.split(opening)
    pieces = [(head + opening, False)]
    for i, turn in enumerate(turns):
        written, rest = turn.split(tokenizer.eos_token, 1)
        pieces.append((written + tokenizer.eos_token, True))
        if i + 1 < len(turns):
            pieces.append((rest + opening, False))
    for piece, written_by_policy in pieces:
        piece_ids = tokenizer(piece, add_special_tokens=False)["input_ids"]
        ids += piece_ids
        mask += [written_by_policy] * len(piece_ids)
    return ids, mask


def warm_up(model: Any, tokenizer: Any, recipe: Recipe, report: Callable[[str], None] = print) -> None:
    """Train ``model`` in place, in float32, on assistant tokens only.

    Each batch holds the modes in the recipe's shares. Questions come from the training set.
    """
    import torch

    torch.manual_seed(recipe.seed)
    rng = random.Random(recipe.seed)
    source = questions(recipe.seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, recipe))
    model.train()
    started = time.monotonic()
    for step in range(recipe.steps):
        traces = [encode_trace(tokenizer, trace(next(source), mode, rng)) for mode in _modes(recipe, rng)]
        loss = _loss(model, traces, tokenizer.pad_token_id)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == recipe.steps - 1:
            report(f"warm-up {step + 1}/{recipe.steps}: loss {loss.item():.4f}, {time.monotonic() - started:.0f} s")
    model.eval()


def _modes(recipe: Recipe, rng: random.Random) -> list[Mode]:
    """Modes of one batch in the recipe's shares; the fractional parts are filled at random."""
    modes = [mode for mode in MODES for _ in range(int(recipe.shares[mode] * recipe.batch))]
    fractions = [recipe.shares[mode] * recipe.batch % 1 for mode in MODES]
    return modes + rng.choices(MODES, weights=fractions, k=recipe.batch - len(modes))


def _rate(step: int, recipe: Recipe) -> float:
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))


def _loss(model: Any, traces: list[tuple[list[int], list[bool]]], pad: int) -> Any:
    """Mean cross-entropy over the assistant tokens of right-padded traces."""
    import torch

    longest = max(len(ids) for ids, _ in traces)
    tokens = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in traces])
    mask = torch.tensor([written + [False] * (longest - len(written)) for _, written in traces])
    logits = model(input_ids=tokens[:, :-1]).logits
    picked = mask[:, 1:]
    return torch.nn.functional.cross_entropy(logits[picked], tokens[:, 1:][picked])
