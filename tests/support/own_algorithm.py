"""The published method written again as a user would: through the hooks for an advantage and a loss of one's own."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_fr.algorithm import LossInput, RewardBatch


def baseline_advantages(batch: RewardBatch) -> torch.Tensor:
    assert batch.action_tokens is not None
    assert len(batch.action_tokens) == len(batch.rewards) == len(batch.metadata)
    return batch.rewards - batch.rewards.mean()


def published_loss(batch: LossInput, *, delta: float) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Uses neither ``lengths`` nor ``sequence_kl``, so that the sum over context ranks does the work."""
    p = batch.behavior_logprobs.double().exp()
    q = batch.logprobs.detach().double().exp()
    kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    kl = torch.where(batch.action_mask, kl, 0.0)
    tokens, total_kl = batch.sum_over_context(torch.stack([batch.action_mask.sum(1).double(), kl.sum(1)]))
    tokens = tokens.clamp(min=1)
    admitted = total_kl / tokens <= delta
    ratio = (batch.logprobs - batch.behavior_logprobs).detach().exp()
    weight = torch.where(batch.action_mask & admitted[:, None], ratio, 0.0)
    scale = (batch.advantages.double() / (tokens * batch.batch_size)).float()
    loss = -(weight * scale[:, None] * batch.logprobs).sum()
    share = (batch.action_mask.sum() / batch.batch_action_tokens).double()
    return loss, {"admitted": admitted, "token_share": share, "loss_again": loss}
