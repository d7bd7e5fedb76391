"""Faults of the loss that users of such systems report and that the loss's own tests do not name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_fr.algorithm.loss import flash_reinforce_loss
from megatron_fr.config import ParallelConfig
from megatron_fr.models.registry import model_spec
from megatron_fr.runtime.device import prepare_process, resolve_device
from megatron_fr.trainer.logprob import LogprobSettings, head_logprobs
from megatron_fr.trainer.model import build_transformer_config
from tools.tiny.model import tiny_config

DEVICE = resolve_device("cpu")
prepare_process(DEVICE)


def test_the_trainers_temperature_is_the_engines_or_everything_would_be_rejected() -> None:
    sampled_at, rows, length, vocab = 0.7, 6, 50, 40
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows * length, 16, generator=generator)
    weight = torch.randn(vocab, 16, generator=generator)
    tempered = (hidden.double() @ weight.double().T / sampled_at).log_softmax(-1)
    targets = torch.multinomial(tempered.exp(), 1, generator=generator)[:, 0]
    behavior = tempered.gather(1, targets[:, None])[:, 0].float().view(rows, length)

    def admitted(temperature: float) -> float:
        logprobs, _ = head_logprobs(hidden, weight, targets, LogprobSettings(vocab, temperature=temperature))
        _, stats = flash_reinforce_loss(
            logprobs.view(rows, length),
            behavior,
            torch.linspace(-1, 1, rows),
            torch.ones(rows, length, dtype=torch.bool),
            delta=1e-6,
            batch_size=rows,
        )
        return float(stats.admitted.sum())

    assert admitted(sampled_at) == rows
    assert admitted(1.0) == 0


def test_a_model_folders_auxiliary_loss_coefficient_does_not_enter_the_objective() -> None:
    hf_config: Any = tiny_config("qwen3_moe")
    hf_config.router_aux_loss_coef, hf_config.output_router_logits = 1e-3, True
    config = build_transformer_config(model_spec(hf_config), ParallelConfig(), DEVICE, dtype=torch.float32)
    assert config.moe_aux_loss_coeff == 0
    assert config.moe_z_loss_coeff is None
    assert config.moe_router_load_balancing_type == "none"
    assert not config.calculate_per_token_loss


@pytest.mark.parametrize("poison", [float("nan"), float("-inf"), float("inf")])
def test_what_stands_in_a_masked_slot_changes_neither_value_nor_gradient(poison: float) -> None:
    generator = torch.Generator().manual_seed(1)
    clean = -torch.rand(3, 8, generator=generator)
    mask = torch.rand(3, 8, generator=generator) < 0.5
    mask[:, 0] = True
    advantages = torch.tensor([0.5, -0.5, 0.25])

    def loss(current: torch.Tensor, behavior: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = current.clone().requires_grad_()
        value, _ = flash_reinforce_loss(leaf, behavior, advantages, mask, delta=1.0, batch_size=3)
        value.backward()
        assert leaf.grad is not None
        return value.detach(), leaf.grad

    near = clean - 0.01
    value, gradient = loss(clean, near)
    poisoned, poisoned_gradient = loss(clean.masked_fill(~mask, poison), near.masked_fill(~mask, poison))
    assert torch.equal(value, poisoned)
    assert torch.equal(gradient, poisoned_gradient)
    assert bool(gradient[mask].any())
