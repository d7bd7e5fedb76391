"""The device switch on a machine without a GPU."""

from __future__ import annotations

import pytest
import torch

from megatron_fr.errors import ConfigError
from megatron_fr.runtime.device import Device, resolve_device, split_gpus

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


@without_gpu
def test_auto_takes_the_cpu_where_there_is_no_gpu() -> None:
    device = resolve_device("auto")
    assert device == resolve_device("cpu") == Device("cpu", torch.device("cpu"))
    assert device.collective_backend == "gloo"
    assert device.transformer_impl("auto") == "local"


@without_gpu
def test_asking_for_a_gpu_that_is_not_there_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"device='cuda'.*device=auto"):
        resolve_device("cuda")


def test_transformer_engine_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.transformer_impl='te' needs a GPU"):
        Device("cpu", torch.device("cpu")).transformer_impl("te")


def test_a_gpu_uses_nccl_and_may_use_local_layers() -> None:
    device = Device("cuda", torch.device("cuda", 0))
    assert device.collective_backend == "nccl"
    assert device.transformer_impl("local") == "local"


def test_trainer_and_engines_on_one_machine_never_share_a_gpu() -> None:
    assert split_gpus(["0", "2", "3", "5"], trainer_ranks=1, engine_gpus=2) == (["0"], ["2", "3"])
    with pytest.raises(ConfigError, match="need 5 GPUs on this machine, 4 are visible"):
        split_gpus(["0", "1", "2", "3"], trainer_ranks=4, engine_gpus=1)
