"""A loss of the user's own in place of the built-in ones (docs/extending.md shows a complete one)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fr.algorithm.stats import LossStats
from megatron_fr.algorithm.tokens import ContextSum, collect_stats, sum_trajectories, view_tokens


@dataclass(frozen=True)
class LossInput:
    """One micro-batch as a loss function sees it: ``b`` trajectories, and the ``T`` slots of their tokens held here.

    Under context parallelism a rank holds a part of each trajectory's tokens. Values ``[b]`` describe the whole
    trajectory on every rank alike. Slots that are no action token hold 0 and false.
    """

    logprobs: Tensor  # float32 [b, T], the tempered policy's; the only tensor that carries a gradient
    behavior_logprobs: Tensor  # float32 [b, T], stored when the tokens were sampled
    entropy: Tensor  # float32 [b, T], nats, of the policy's whole distribution
    action_mask: Tensor  # bool [b, T]
    versions: Tensor  # int32 [b, T], the policy version that sampled each token
    advantages: Tensor  # float32 [b], of the whole update's batch
    lengths: Tensor  # int64 [b], action tokens (T_i); 0 for a row of padding
    sequence_kl: Tensor  # float64 [b], nats, the sequence trust region's D_i
    batch_size: int  # trajectories of the whole update over all ranks (B)
    batch_action_tokens: int  # action tokens of the whole update over all ranks
    #: Adds a tensor over the ranks that hold parts of the same trajectories; the sum has no gradient. Every rank must
    #: call it equally often, with equal shapes.
    sum_over_context: ContextSum


#: Takes a micro-batch (and ``algorithm.loss_args``); returns this call's part of the loss, and statistics.
LossFn = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]


def own_loss(
    function: LossFn,
    arguments: Mapping[str, Any],
    *,
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    entropy: Tensor,
    action_mask: Tensor,
    versions: Tensor,
    advantages: Tensor,
    batch_size: int,
    batch_action_tokens: int,
    sum_over_context: ContextSum | None = None,
) -> tuple[Tensor, LossStats, dict[str, Tensor]]:
    """Call ``function`` on one micro-batch; see :class:`LossInput` for the tensors.

    Returns:
        The loss, the statistics of every loss, and the function's own: scalars that add up over calls as the loss does.
        Its ``admitted``, bool ``[b]`` or ``[b, T]``, says what entered the loss.

    Raises:
        FloatingPointError: a non-finite log-probability on an action token.
        ValueError: the function returned something else.
    """
    view = view_tokens(logprobs, behavior_logprobs, action_mask, advantages, batch_size)
    trajectories = sum_trajectories(view, torch.zeros_like(action_mask), sum_over_context)
    given = LossInput(
        logprobs=view.logprobs,
        behavior_logprobs=torch.where(action_mask, behavior_logprobs, 0.0),
        entropy=torch.where(action_mask, entropy, 0.0),
        action_mask=action_mask,
        versions=versions,
        advantages=advantages,
        lengths=trajectories.tokens.long(),
        sequence_kl=trajectories.sequence_kl,
        batch_size=batch_size,
        batch_action_tokens=batch_action_tokens,
        sum_over_context=sum_over_context or torch.Tensor.detach,
    )
    loss, answer = function(given, **arguments)
    if loss.ndim != 0 or not loss.requires_grad:
        raise ValueError(
            f"the loss has shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}; return a scalar made from "
            "logprobs"
        )
    own = dict(answer)
    admitted = torch.as_tensor(own.pop("admitted", torch.ones_like(advantages, dtype=torch.bool)))
    own = {name: torch.as_tensor(value).detach().double() for name, value in own.items()}
    for name, value in own.items():
        if value.ndim != 0:
            raise ValueError(f"the statistic {name!r} has shape {tuple(value.shape)}; return a scalar")
    if admitted.dtype != torch.bool or admitted.shape not in (advantages.shape, action_mask.shape):
        raise ValueError(f"'admitted' is {admitted.dtype} {tuple(admitted.shape)}; return bool [b] or [b, T]")
    rows = admitted if admitted.ndim == 1 else None
    used = action_mask & (admitted if rows is None else rows[:, None])
    return loss, collect_stats(view, trajectories, used, view.ratio(used), admitted=rows), own
