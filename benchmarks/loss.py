"""Head and log-probability, forward and backward: ours against plain torch, in time and in peak memory.

    python -m benchmarks.loss [--quick]

All variants start from the same hidden states ``[tokens, hidden]`` and output weight ``[vocabulary, hidden]`` and end
with both gradients; the product of the head is part of each:

- ``plain`` (a): ``(hidden @ weight.T).float().log_softmax(-1).gather(...)``, what most trainers do;
- ``cross_entropy`` (b): ``torch.nn.functional.cross_entropy`` on the logits as they are: in bfloat16 less exact than
  ours, and without the entropy that ours returns;
- ``keep`` and ``recompute``: the two modes of ``train.logprob_mode``.

The variants run in turn and medians are compared, since a machine may be shared. Peak memory is everything beyond the
inputs, gradients included (see ``benchmarks/measure.py``). The last line is one JSON object: ``*_time_ratio`` is the
time over that of (b), ``*_memory_ratio`` the peak over that of (a), each the worst of the cases; ``cases`` has all.
``--quick`` runs one dtype with a narrower model. A processor without instructions for bfloat16 (its products there take
up to a hundred times longer) runs float32 only. Goals: keep 1.1 and 0.5, recompute 1.4 and 0.25.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from benchmarks.measure import interleave
from megatron_fr.trainer.logprob import LogprobMode, LogprobSettings, head_logprobs

CHUNK_TOKENS = 256
VOCABULARIES = (32_000, 151_936)


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(a)"""
    return (hidden @ weight.t()).float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


def cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(b)"""
    return -functional.cross_entropy(hidden @ weight.t(), targets, reduction="none")


def ours(mode: LogprobMode, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return head_logprobs(hidden, weight, targets, LogprobSettings(len(weight), mode=mode, chunk_tokens=CHUNK_TOKENS))[0]


def run_case(
    dtype: torch.dtype, vocabulary: int, tokens: int, width: int, repetitions: int, budget_s: float
) -> dict[str, Any]:
    """Measure all variants on one set of tensors."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, device=device).mul_(width**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device=device)
    upstream = torch.randn(tokens, device=device)

    def work(function: Any) -> None:
        hidden.grad = weight.grad = None
        values = function(hidden, weight, targets)
        values.backward(upstream.to(values.dtype))

    variants = {
        "plain": plain,
        "cross_entropy": cross_entropy,
        "keep": partial(ours, "keep"),
        "recompute": partial(ours, "recompute"),
    }
    samples = interleave({name: partial(work, function) for name, function in variants.items()}, repetitions, budget_s)
    row: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "vocabulary": vocabulary,
        "repetitions": len(samples["keep"].seconds),
    }
    for name, sample in samples.items():
        row[f"{name}_s"] = round(sample.median_s, 4)
        row[f"{name}_peak_mib"] = round(sample.median_peak / 2**20, 1)
    for mode in ("keep", "recompute"):
        row[f"{mode}_time_ratio"] = round(samples[mode].median_s / samples["cross_entropy"].median_s, 3)
        row[f"{mode}_memory_ratio"] = round(samples[mode].median_peak / samples["plain"].median_peak, 3)
    return row


def dtypes() -> tuple[torch.dtype, ...]:
    """Those whose matrix products are worth timing on this machine."""
    fast = torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.bfloat16, torch.float32) if fast else (torch.float32,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under 40 s on one thread")
    quick = parser.parse_args().quick
    started = time.monotonic()
    tokens, width, repetitions, budget_s = (512, 192, 3, 8.0) if quick else (1024, 896, 3, float("inf"))
    cases = []
    for dtype in dtypes()[:1] if quick else dtypes():
        for vocabulary in VOCABULARIES:
            row = run_case(dtype, vocabulary, tokens, width, repetitions, budget_s)
            print(f"{time.monotonic() - started:.0f} s: {row}", flush=True)
            cases.append(row)
    names = ("keep_time_ratio", "recompute_time_ratio", "keep_memory_ratio", "recompute_memory_ratio")
    print(
        json.dumps(
            {
                "benchmark": "loss",
                **{name: max(row[name] for row in cases) for name in names},
                "tokens": tokens,
                "hidden": width,
                "chunk_tokens": CHUNK_TOKENS,
                "threads": torch.get_num_threads(),
                "seconds": round(time.monotonic() - started, 1),
                "cases": cases,
            }
        )
    )


if __name__ == "__main__":
    main()
