#!/usr/bin/env python3
"""Show what a Hugging Face folder or a Megatron torch_dist checkpoint holds, and what is wrong with it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    arguments = parser.parse_args()

    from megatron_fr.convert.inspect import inspect_folder
    from megatron_fr.errors import MegatronFRError

    try:
        print(inspect_folder(arguments.dir, tensors=arguments.tensors))
    except MegatronFRError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
