"""What the process has loaded from which the tests' ranks are forked (``parallel_launch``)."""

import importlib
import os
import warnings

os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

from megatron_fr.runtime.device import prepare_process, resolve_device

warnings.simplefilter("ignore")
prepare_process(resolve_device("cpu"))
for name in ("megatron_fr.trainer.loop", "transformers"):
    importlib.import_module(name)
