#!/usr/bin/env python3
"""Convert a Hugging Face folder to a Megatron torch_dist checkpoint."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("hf_dir", help="Hugging Face folder or hub name")
    parser.add_argument("out_dir", type=Path, help="checkpoint folder to write")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size to store for (default: 1)")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel size to store for (default: 1)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline size to store for (default: 1)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the folder's")
    arguments = parser.parse_args()

    import torch

    from megatron_fr.bridge.progress import report
    from megatron_fr.bridge.to_megatron import convert_hf_to_megatron

    return report(
        lambda meter: convert_hf_to_megatron(
            arguments.hf_dir,
            arguments.out_dir,
            tensor=arguments.tp,
            expert=arguments.ep,
            pipeline=arguments.pp,
            dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
            progress=meter,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
