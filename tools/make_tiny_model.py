"""Make a tiny tool-using policy and its prompts: a complete run's model and data on a CPU, in a few minutes."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "out_dir",
        type=Path,
        nargs="?",
        help="folder to write; left as it is when it is complete (default: one in this machine's cache, printed at the "
        "end, with the progress on stderr)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and questions (default: 0)")
    parser.add_argument("--prompts", type=int, default=2000, help="lines of train.jsonl (default: 2000)")
    parser.add_argument("--eval-prompts", type=int, default=256, help="lines of eval.jsonl (default: 256)")
    parser.add_argument("--steps", type=int, default=None, help="warm-up steps (default: the recipe's)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    arguments = parser.parse_args()
    for name in ("prompts", "eval_prompts", "threads"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    os.environ.setdefault("OMP_NUM_THREADS", str(arguments.threads))

    import torch

    from tools.tiny.build import cached_folder, make_tiny_model
    from tools.tiny.warmup import Recipe

    torch.set_num_threads(arguments.threads)
    recipe = Recipe(seed=arguments.seed) if arguments.steps is None else Recipe(arguments.seed, arguments.steps)
    try:
        folder = make_tiny_model(
            arguments.out_dir or cached_folder(recipe, arguments.prompts, arguments.eval_prompts),
            recipe=recipe,
            num_train=arguments.prompts,
            num_eval=arguments.eval_prompts,
            report=lambda line: print(line, flush=True, file=sys.stdout if arguments.out_dir else sys.stderr),
        )
    except FileExistsError as error:
        sys.exit(str(error))
    if not arguments.out_dir:
        print(folder)


if __name__ == "__main__":
    main()
