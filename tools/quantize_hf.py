#!/usr/bin/env python3
"""Quantise a Hugging Face folder to FP8 with ModelOpt; load it again and print its error against bfloat16."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("hf_dir", help="Hugging Face folder or hub name")
    parser.add_argument("out_dir", type=Path, help="folder to write; new or empty, or see --overwrite")
    parser.add_argument(
        "--calibration",
        required=True,
        help="a run's output folder (the trajectories that waited in its training checkpoints, newest first), one of "
        "those checkpoints (training_state/update-N), an archive of trajectories (npz), or JSONL with 'tokens' or "
        "'prompt'",
    )
    parser.add_argument("--limit", type=int, default=64, help="sequences used (default: 64)")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a model or checkpoint in OUT_DIR, and all else in there"
    )
    arguments = parser.parse_args()
    if arguments.limit < 1:
        parser.error(f"--limit must be at least 1, not {arguments.limit}")

    from megatron_fr.convert.calibration import read_calibration
    from megatron_fr.convert.quantize import quantize_hf
    from megatron_fr.errors import MegatronFRError

    try:
        sequences = read_calibration(arguments.calibration, arguments.hf_dir, limit=arguments.limit)
        error = quantize_hf(arguments.hf_dir, arguments.out_dir, sequences, overwrite=arguments.overwrite)
    except MegatronFRError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    print(
        f"{arguments.out_dir}, loaded again: |log-probability - bfloat16's| mean {error['mean']:.4f}, "
        f"max {error['max']:.4f} nats over {error['tokens']:.0f} tokens"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
