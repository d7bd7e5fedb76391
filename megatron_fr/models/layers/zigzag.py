"""Context parallelism: which tokens of a sequence a rank holds.

A sequence of ``P`` positions is cut into ``2 x CP`` equal chunks; rank ``r`` holds chunks ``r`` and ``2 x CP - 1 - r``
(zig-zag), so that causal attention costs every rank the same. Megatron-Core and Transformer Engine use this order.
"""

import torch


def zigzag_positions(length: int, rank: int, size: int) -> torch.Tensor:
    """Positions int64 ``[length / size]`` of a sequence that rank ``rank`` of ``size`` holds, ascending.

    ``length`` is a multiple of ``2 x size``, or anything for one rank.
    """
    if size == 1:
        return torch.arange(length)
    if length % (2 * size):
        raise ValueError(f"a sequence of {length} positions does not split into 2 x {size} equal chunks; pad it")
    chunks = torch.arange(length).view(2 * size, -1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
