"""Advantages and losses of one's own: their errors are the update's, with file and line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_fr.algorithm import RewardBatch
from megatron_fr.config import FlashReinforceConfig, OwnLossConfig
from megatron_fr.errors import ConfigError, UpdateError
from megatron_fr.trainer.data.batch import build_micro_batch
from megatron_fr.trainer.objective import BatchConstants, Objective
from tests.support.samples import trajectory


def raises(*_: Any) -> Any:
    raise KeyError("level")


def returns_nothing_new(batch: Any) -> Any:
    return batch.logprobs.detach().sum(), {}


def test_an_advantage_that_raises_names_the_error_and_the_line() -> None:
    objective = Objective(FlashReinforceConfig(advantage=f"{__name__}:raises"))
    with pytest.raises(UpdateError, match=r"algorithm.advantage: KeyError: 'level' \(.*test_objective.py:19\)"):
        objective.advantages(RewardBatch(torch.ones(2, dtype=torch.float64)))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", r"algorithm.loss: KeyError: 'level' \(.*test_objective.py:19\)"),
        ("returns_nothing_new", "algorithm.loss: ValueError: the loss has shape .*requires_grad=False"),
    ],
)
def test_a_loss_that_raises_or_returns_what_cannot_be_used_is_an_error_of_the_update(name: str, reason: str) -> None:
    objective = Objective(OwnLossConfig(loss=f"{__name__}:{name}"))
    batch = build_micro_batch([trajectory("a")], [1.0])
    logprobs = torch.full((1, 3), -1.0, requires_grad=True)
    with pytest.raises(UpdateError, match=reason):
        objective.loss(batch, logprobs, torch.zeros(1, 3), BatchConstants(1, 2))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        (f"{__name__}:nope", "cannot be imported: AttributeError"),
        (f"{__name__}:__doc__", "is not callable"),
        (":f", "is no import path"),
    ],
)
def test_a_path_that_cannot_be_used_is_refused_before_anything_is_built(path: str, reason: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"algorithm.loss={path!r} {reason}.*; give module:name of a function or class"
    ):
        Objective(OwnLossConfig(loss=path))
    with pytest.raises(ConfigError, match=rf"algorithm.advantage={path!r} {reason}"):
        Objective(FlashReinforceConfig(advantage=path))
