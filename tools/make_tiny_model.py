#!/usr/bin/env python3
"""Make a tiny tool-using policy and its prompts: a complete run's model and data on a CPU, in a few minutes."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_dir", type=Path, help="folder to write; left as it is when it is already complete")
    parser.add_argument("--seed", type=int, default=0, help="of weights, questions and sampling (default: 0)")
    parser.add_argument("--prompts", type=int, default=2000, help="lines of train.jsonl (default: 2000)")
    parser.add_argument("--eval-prompts", type=int, default=256, help="lines of eval.jsonl (default: 256)")
    parser.add_argument("--steps", type=int, default=None, help="warm-up steps (default: the recipe's)")
    parser.add_argument(
        "--evaluate", type=int, default=128, help="held-out prompts to sample at the end (default: 128)"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    arguments = parser.parse_args()
    for name in ("prompts", "eval_prompts", "threads"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    os.environ.setdefault("OMP_NUM_THREADS", str(arguments.threads))

    import torch

    from megatron_fr.tiny.build import make_tiny_model
    from megatron_fr.tiny.warmup import Recipe

    torch.set_num_threads(arguments.threads)
    recipe = Recipe(seed=arguments.seed) if arguments.steps is None else Recipe(arguments.seed, arguments.steps)
    try:
        make_tiny_model(
            arguments.out_dir,
            recipe=recipe,
            num_train=arguments.prompts,
            num_eval=arguments.eval_prompts,
            evaluate=arguments.evaluate,
            report=lambda line: print(line, flush=True),
        )
    except FileExistsError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
