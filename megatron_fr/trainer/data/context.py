"""Context parallelism: whole-trajectory values from the parts that the ranks hold (``models/layers/zigzag.py``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_fr.algorithm.failure_filter import failure_token_mask


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that hold parts of the same trajectories."""

    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """This rank's part."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """How many parts there are."""
        return dist.get_world_size(self.group)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` added over the parts, without gradient: the hook by which the losses see whole trajectories."""
        total = values.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def failure_mask(
        self,
        entropy: torch.Tensor,
        action_mask: torch.Tensor,
        positions: torch.Tensor,
        advantages: torch.Tensor,
        quantile: float,
    ) -> torch.Tensor:
        """This rank's part of :func:`failure_token_mask` over whole trajectories.

        Args:
            entropy: ``[b, W]`` of this part; every rank has the same ``W``.
            action_mask: bool ``[b, W]``.
            positions: int64 ``[b, W]``, place in the whole trajectory: equal entropies are ordered by it.
            advantages: ``[b]``.
            quantile: share kept.
        """
        whole = [self._gather(t) for t in (entropy, action_mask.to(torch.uint8), positions)]
        order = whole[2].argsort(dim=1, stable=True)
        ordered = failure_token_mask(whole[0].gather(1, order), whole[1].gather(1, order).bool(), advantages, quantile)
        keep = torch.empty_like(ordered).scatter_(1, order, ordered)
        return keep[:, self.rank * entropy.shape[1] :][:, : entropy.shape[1]]

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)
