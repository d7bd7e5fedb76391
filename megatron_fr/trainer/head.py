"""Output layer of Megatron's GPT model, replaced by :func:`megatron_fr.trainer.logprob.head_logprobs`.

``GPTModel.forward`` gives the hidden states to its ``output_processor``, a :class:`LogprobHead`, with a
:class:`HeadTask` as the context. Tied embeddings and DDP's hooks and buffers work as with Megatron's own layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

from megatron_fr.trainer.logprob import LogprobSettings, head_logprobs


@dataclass(frozen=True)
class HeadTask:
    """Targets of one forward, equal on all ranks of a tensor-parallel group."""

    targets: torch.Tensor  # int64 [b, P], next token of each position
    wanted: torch.Tensor | None = None  # bool [b, P], positions that go through the head; the others give 0


@dataclass(frozen=True)
class LogprobHead:
    """An ``output_processor`` for ``GPTModel.forward``."""

    settings: LogprobSettings

    def __call__(
        self,
        *,
        hidden_states: torch.Tensor,  # [P, b, H], or this rank's [P / TP, b, H] under sequence parallelism
        output_layer: Any,
        output_weight: torch.Tensor | None,  # of a tied embedding; None without ties
        context: HeadTask,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities (differentiable) and entropy (without gradient), float32 ``[b, P]``."""
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
        logprobs, entropy = head_logprobs(hidden, weight, targets, self.settings)
        if where is not None:
            logprobs, entropy = (v.new_zeros(positions * rows).index_copy(0, where, v) for v in (logprobs, entropy))
        return logprobs.view(positions, rows).t(), entropy.view(positions, rows).t()
