"""Output layer of Megatron's GPT model, replaced by :func:`megatron_fr.trainer.logprob.head_logprobs`.

``GPTModel.forward`` gives the hidden states to an ``output_processor`` in place of its output layer. With a
:class:`LogprobHead` there and a :class:`HeadTask` as its context, the last pipeline stage returns log-probabilities and
entropy. Tied embeddings, DDP's gradient hooks and float32 buffers work as with Megatron's own layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

from megatron_fr.trainer.logprob import LogprobSettings, head_logprobs


@dataclass(frozen=True)
class HeadTask:
    """Targets of one forward, equal on all ranks of a tensor-parallel group.

    Attributes:
        targets: int64 ``[b, P]``, next token of each position.
        wanted: bool ``[b, P]``, positions that go through the head; the others give 0. None: all of them.
    """

    targets: torch.Tensor
    wanted: torch.Tensor | None = None


@dataclass(frozen=True)
class LogprobHead:
    """An ``output_processor`` for ``GPTModel.forward``."""

    settings: LogprobSettings

    def __call__(
        self,
        *,
        hidden_states: torch.Tensor,
        output_layer: Any,
        output_weight: torch.Tensor | None,
        context: HeadTask,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities (differentiable) and entropy (without gradient), float32 ``[b, P]``.

        Args:
            hidden_states: ``[P, b, H]``, or this rank's ``[P / TP, b, H]`` under sequence parallelism.
            output_layer: Megatron's output layer, for its weight.
            output_weight: weight of a tied embedding; None without ties.
        """
        weight = output_layer.weight if output_weight is None else output_weight
        group = self.settings.group
        if output_layer.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
        rows, positions = context.targets.shape
        hidden = hidden_states.reshape(positions * rows, -1)
        # The sequence is the first dimension of Megatron's hidden states.
        targets = context.targets.t().reshape(-1)
        where = None
        if context.wanted is not None:
            where = context.wanted.t().reshape(-1).nonzero().squeeze(1)
            hidden, targets = hidden[where], targets[where]
        if not output_layer.sequence_parallel and group is not None:
            # An identity whose backward sums the ranks' gradients.
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        values = head_logprobs(hidden, weight, targets, self.settings)
        if where is not None:
            logprobs, entropy = (v.new_zeros(positions * rows).index_copy(0, where, v) for v in values)
        else:
            logprobs, entropy = values
        return logprobs.view(positions, rows).t(), entropy.view(positions, rows).t()
