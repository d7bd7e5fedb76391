#!/usr/bin/env python3
"""Convert a Megatron torch_dist checkpoint, of any layout, to a Hugging Face folder.

OUT_DIR must be new or empty (but see --overwrite). It appears when it is complete; until then the files are in
.NAME.tmp beside it, which a killed conversion leaves and the next one to OUT_DIR removes. In memory are one layer's
experts and one weight file.
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
    parser.add_argument("--shard-gb", type=float, default=2.0, help="largest weight file, 10^9 bytes (default: 2)")
    parser.add_argument("--verify", action="store_true", help="read OUT_DIR again, compare it bit by bit")
    parser.add_argument("--overwrite", action="store_true", help="replace a result in OUT_DIR, and all else in there")
    arguments = parser.parse_args()
    if not 0 < arguments.shard_gb < math.inf:
        parser.error(f"--shard-gb must be above 0, not {arguments.shard_gb}")

    from megatron_fr.convert.megatron import convert_megatron_to_hf, report

    return report(
        lambda: convert_megatron_to_hf(
            arguments.checkpoint_dir,
            arguments.out_dir,
            hf_dir=arguments.hf_dir,
            verify=arguments.verify,
            overwrite=arguments.overwrite,
            shard_bytes=int(arguments.shard_gb * 1e9),
        ),
        verified=arguments.verify,
    )


if __name__ == "__main__":
    sys.exit(main())
