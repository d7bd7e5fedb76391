"""RMSNorm for Megatron-Core's local layers."""

from __future__ import annotations

from typing import Any

import torch


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, also under sequence parallelism, which Megatron-Core's own wrapper refuses.

    Each TP rank sees only its part of the sequence. The tag on the weight makes Megatron-Core sum its gradient.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        del unused
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel
