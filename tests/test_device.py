"""The device switch on a machine without a GPU."""

from __future__ import annotations

import pytest
import torch

from megatron_fr.device import Device, resolve_device
from megatron_fr.errors import ConfigError

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
