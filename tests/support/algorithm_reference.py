"""The formulas once more, in plain Python with loops, and batches to try them on."""

from __future__ import annotations

import math

import torch


def clamp(x, low, high):
    return max(low, min(high, x))


def kl(log_mu, log_pi):
    p = clamp(math.exp(log_mu), 1e-6, 1 - 1e-6)
    q = clamp(math.exp(log_pi), 1e-6, 1 - 1e-6)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def flash_loss(
    pi, mu, advantages, mask, *, delta, batch_size, reduction="sample_mean", admission="sequence",
    importance="token", truncation=2.0, loss_mask=None, batch_action_tokens=None,
):  # fmt: skip
    """Loss, gradient by the closed form (list of rows), D_i and m_i, of lists of rows."""
    loss, gradient, divergences, admitted = 0.0, [], [], []
    for i in range(len(pi)):
        actions = [t for t in range(len(pi[i])) if mask[i][t]]
        d = [kl(mu[i][t], pi[i][t]) for t in actions]
        mean_d = max(0.0, sum(d) / len(d)) if d else 0.0
        divergences.append(mean_d)
        admitted.append(admission != "sequence" or mean_d <= delta)
        row = [0.0] * len(pi[i])
        for t, d_t in zip(actions, d, strict=True):
            if not admitted[-1] or (admission == "token" and d_t > delta):
                continue
            if loss_mask is not None and not loss_mask[i][t]:
                continue
            rho = math.exp(pi[i][t] - mu[i][t])
            rho = {"token": rho, "truncated": min(rho, truncation), "off": 1.0}[importance]
            denominator = batch_size * len(actions) if reduction == "sample_mean" else batch_action_tokens
            row[t] = -advantages[i] * rho / denominator
            loss += row[t] * pi[i][t]
        gradient.append(row)
    return loss, gradient, divergences, admitted


def grpo_loss(pi, old, advantages, mask, *, clip_low, clip_high, batch_size, batch_action_tokens=None):
    """Loss and gradient by the closed form."""
    loss, gradient = 0.0, []
    for i in range(len(pi)):
        actions = [t for t in range(len(pi[i])) if mask[i][t]]
        row = [0.0] * len(pi[i])
        for t in actions:
            rho = math.exp(pi[i][t] - old[i][t])
            bounded = clamp(rho, 1 - clip_low, 1 + clip_high)
            share = 1 / (batch_action_tokens or len(actions) * batch_size)
            loss -= min(rho * advantages[i], bounded * advantages[i]) * share
            if rho * advantages[i] <= bounded * advantages[i]:
                row[t] = -rho * advantages[i] * share
        gradient.append(row)
    return loss, gradient


def batch(seed=0, rows=6, length=11, drift=0.3, dtype=torch.float64):
    """(logprobs, behavior, advantages, mask): rows of 1 to ``length`` action tokens, drift growing with the row."""
    generator = torch.Generator().manual_seed(seed)
    mu = -torch.rand(rows, length, generator=generator, dtype=torch.float64) * 2 - 0.05
    noise = torch.randn(rows, length, generator=generator, dtype=torch.float64)
    pi = (mu + noise * drift * torch.arange(rows)[:, None] / rows).clamp(max=-1e-3)
    mask = torch.rand(rows, length, generator=generator) < 0.6
    mask[:, 0] = False
    mask[:, 1] = True
    rewards = torch.rand(rows, generator=generator, dtype=torch.float64)
    advantages = rewards - rewards.mean()
    return pi.to(dtype), mu.to(dtype), advantages.to(dtype), mask
