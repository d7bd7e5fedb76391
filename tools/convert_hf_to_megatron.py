#!/usr/bin/env python3
"""Convert a Hugging Face folder to a Megatron torch_dist checkpoint of weights alone.

Any layout can load it: Megatron-Core's dist_checkpointing, this package's trainer.weights_checkpoint.load_weights, and
convert_megatron_to_hf.py. "megatron-fr train" starts from a Hugging Face folder (model.path) and does not read it, nor
does resuming, which needs the optimizer's state too.

OUT_DIR must be new or empty (but see --overwrite). It appears when it is complete; until then the files are in
.NAME.tmp beside it, which a killed conversion leaves and the next one to OUT_DIR removes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hf_dir", help="Hugging Face folder or hub name")
    parser.add_argument("out_dir", type=Path, help="checkpoint folder to write")
    parser.add_argument(
        "--tp",
        type=int,
        default=1,
        help="tensor-parallel size to store for (default: 1); must divide the number of KV heads (they "
        "are not repeated, so that a larger size is refused)",
    )
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel size to store for (default: 1)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline size to store for (default: 1)")
    parser.add_argument(
        "--threads",
        type=int,
        default=4,
        help="that write files side by side (default: 4); where weights are cast, each holds a tensor in memory",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the folder's")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a model or checkpoint in OUT_DIR, and all else in there"
    )
    arguments = parser.parse_args()
    if arguments.threads < 1:
        parser.error(f"--threads must be at least 1, not {arguments.threads}")

    import torch

    from megatron_fr.hf.progress import report
    from megatron_fr.hf.to_megatron import convert_hf_to_megatron

    return report(
        lambda meter: convert_hf_to_megatron(
            arguments.hf_dir,
            arguments.out_dir,
            tensor=arguments.tp,
            expert=arguments.ep,
            pipeline=arguments.pp,
            dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
            threads=arguments.threads,
            overwrite=arguments.overwrite,
            progress=meter,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
