#!/usr/bin/env python3
"""Convert a Hugging Face folder to a Megatron torch_dist checkpoint of weights alone.

Any layout can load it: a run with model.weights=OUT_DIR starts from it, and convert_megatron_to_hf.py converts it back.
One process holds the whole model in memory, whatever the sizes. A model that is too large for that is split over ranks:

    torchrun --nproc-per-node 4 tools/convert_hf_to_megatron.py HF_DIR OUT_DIR --tp 2 --pp 2

OUT_DIR must be new or empty (but see --overwrite). It appears when it is complete; until then the files are in
.NAME.tmp beside it, which a killed conversion leaves and the next one to OUT_DIR removes. No GPU is used.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hf_dir", help="Hugging Face folder or hub name")
    parser.add_argument("out_dir", type=Path, help="checkpoint folder to write")
    for name, what in (("tp", "KV heads"), ("ep", "experts"), ("pp", "layers")):
        parser.add_argument(f"--{name}", type=int, default=1, help=f"size of the layout, a divisor of the {what} (1)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the folder's")
    parser.add_argument("--verify", action="store_true", help="read OUT_DIR again and compare every bit with HF_DIR")
    parser.add_argument("--overwrite", action="store_true", help="replace a result in OUT_DIR, and all else in there")
    arguments = parser.parse_args()
    for name in ("tp", "ep", "pp"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(arguments, name)}")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

    from megatron_fr.convert.megatron import convert_hf_to_megatron, report

    return report(lambda: convert_hf_to_megatron(**vars(arguments)), verified=arguments.verify)


if __name__ == "__main__":
    sys.exit(main())
