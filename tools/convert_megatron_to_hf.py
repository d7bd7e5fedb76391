#!/usr/bin/env python3
"""Convert a Megatron torch_dist checkpoint, of any layout, to a Hugging Face folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "checkpoint_dir", type=Path, help="a run's training_state/update-N, or any folder with .metadata in or below it"
    )
    parser.add_argument("out_dir", type=Path, help="Hugging Face folder to write")
    parser.add_argument("--hf-dir", help="folder or hub name with configuration and tokenizer (default: CHECKPOINT/hf)")
    parser.add_argument("--processes", type=int, default=1, help="files written side by side (default: 1)")
    parser.add_argument("--shard-gb", type=float, default=5.0, help="largest weight file, 10^9 bytes (default: 5)")
    parser.add_argument("--verify", action="store_true", help="compare every bit with the checkpoint afterwards")
    arguments = parser.parse_args()

    from megatron_fr.bridge.progress import report
    from megatron_fr.bridge.to_hf import convert_megatron_to_hf

    return report(
        lambda meter: convert_megatron_to_hf(
            arguments.checkpoint_dir,
            arguments.out_dir,
            hf_dir=arguments.hf_dir,
            processes=arguments.processes,
            verify=arguments.verify,
            shard_bytes=int(arguments.shard_gb * 1e9),
            progress=meter,
        ),
        ", verified" if arguments.verify else "",
    )


if __name__ == "__main__":
    sys.exit(main())
