"""The sizes of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Sizes that weight mappings speak of; those of experts are 0 for dense models.

    Attributes:
        ffn: width of a dense MLP.
        moe_ffn, shared_ffn: width of one routed expert, and of the expert that every token passes (0: none).
        top_k: experts chosen for each token.
        moe_layers: layers, from 0 and ascending, whose MLP is a mixture of experts.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    experts: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    top_k: int = 0
    moe_layers: tuple[int, ...] = ()

    @property
    def moe(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return bool(self.moe_layers)

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim

    def padded_vocab(self, tensor: int) -> int:
        """The vocabulary, rounded up to a multiple of the TP size."""
        return -(-self.vocab // tensor) * tensor

    def shape(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Turn the names of sizes into a shape."""
        return tuple(getattr(self, name) for name in names)
