"""What transformers computes for the same tokens: log-probabilities and routes, in float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch


@cache
def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager").eval()


def forward(
    path: Path, tokens: list[int], *, past: Any = None, temperature: float = 1.0
) -> tuple[np.ndarray, np.ndarray, Any]:
    """Log-probabilities ``[N, vocab]``, routes ``[N, layers, 2]`` and the cache after the ``N`` tokens."""
    with torch.no_grad():
        out = load(path)(
            input_ids=torch.tensor([tokens]), past_key_values=past, use_cache=True, output_router_logits=True
        )
    logprobs = torch.log_softmax(out.logits[0] / temperature, dim=-1).numpy()
    routes = np.stack([layer.topk(2, dim=-1).indices.numpy() for layer in out.router_logits], axis=1)
    return logprobs, routes, out.past_key_values


def next_logprobs(logprobs: np.ndarray, following: list[int]) -> np.ndarray:
    """Row ``t``'s log-probability of the token that follows it."""
    return logprobs[np.arange(len(following)), following]
