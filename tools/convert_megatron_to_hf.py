#!/usr/bin/env python3
"""Convert a Megatron torch_dist checkpoint, of any layout, to a Hugging Face folder.

OUT_DIR must be new or empty (but see --overwrite). It appears when it is complete; until then the files are in
.NAME.tmp beside it, which a killed conversion leaves and the next one to OUT_DIR removes.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "checkpoint_dir", type=Path, help="a run's training_state/update-N, or any folder with .metadata in or below it"
    )
    parser.add_argument("out_dir", type=Path, help="Hugging Face folder to write")
    parser.add_argument(
        "--hf-dir",
        help="folder or hub name with configuration and tokenizer (default: CHECKPOINT/hf); "
        "of a hub name no weights are fetched",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=4,
        help="that write files side by side (default: 4); where weights are cast, each holds a tensor in memory, with "
        "--verify up to five times the largest one",
    )
    parser.add_argument("--shard-gb", type=float, default=5.0, help="largest weight file, 10^9 bytes (default: 5)")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="first compare the checkpoint's files with the SHA-256 sums in its manifest.json (a run's checkpoints "
        "have one; without this option only sizes are checked), at the end every bit of OUT_DIR with the checkpoint; "
        "takes longer: the checkpoint is read in full, optimizer state included, and OUT_DIR once more",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a model or checkpoint in OUT_DIR, and all else in there"
    )
    arguments = parser.parse_args()
    if not 0 < arguments.shard_gb < math.inf:
        parser.error(f"--shard-gb must be above 0, not {arguments.shard_gb}")
    if arguments.threads < 1:
        parser.error(f"--threads must be at least 1, not {arguments.threads}")

    from megatron_fr.hf.progress import report
    from megatron_fr.hf.to_hf import convert_megatron_to_hf

    return report(
        lambda meter: convert_megatron_to_hf(
            arguments.checkpoint_dir,
            arguments.out_dir,
            hf_dir=arguments.hf_dir,
            threads=arguments.threads,
            verify=arguments.verify,
            overwrite=arguments.overwrite,
            shard_bytes=int(arguments.shard_gb * 1e9),
            progress=meter,
        ),
        ", verified" if arguments.verify else "",
    )


if __name__ == "__main__":
    sys.exit(main())
