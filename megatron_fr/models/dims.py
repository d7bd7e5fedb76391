"""The sizes of a model, read from its Hugging Face configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_fr.errors import ModelError

_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)


@dataclass(frozen=True)
class Dims:
    """Sizes that weight rules speak of; ``experts``, ``moe_ffn`` and ``top_k`` are 0 for dense models.

    ``moe_layers`` are the layers, from 0 and ascending, whose MLP is a mixture of experts.
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
    top_k: int = 0
    moe_layers: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, hf_config: Any) -> Dims:
        """Read a transformers configuration object.

        Raises:
            ModelError: a size is not above 0.
        """
        for name in _SIZES:
            if getattr(hf_config, name) < 1:
                raise ModelError(f"config.json: {name} is {getattr(hf_config, name)}, expected 1 or more")
        return cls(
            layers=hf_config.num_hidden_layers,
            hidden=hf_config.hidden_size,
            heads=hf_config.num_attention_heads,
            kv_heads=hf_config.num_key_value_heads,
            head_dim=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads,
            ffn=hf_config.intermediate_size,
            vocab=hf_config.vocab_size,
            experts=getattr(hf_config, "num_experts", None) or 0,
            moe_ffn=getattr(hf_config, "moe_intermediate_size", None) or 0,
            top_k=getattr(hf_config, "num_experts_per_tok", None) or 0,
            moe_layers=_moe_layers(hf_config),
        )

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


def _moe_layers(hf_config: Any) -> tuple[int, ...]:
    """Every ``decoder_sparse_step``-th layer has experts, except those in ``mlp_only_layers`` (Qwen3-MoE's rule)."""
    if not getattr(hf_config, "num_experts", None):
        return ()
    step = getattr(hf_config, "decoder_sparse_step", None) or 1
    dense = set(getattr(hf_config, "mlp_only_layers", None) or ())
    return tuple(
        layer for layer in range(hf_config.num_hidden_layers) if layer not in dense and (layer + 1) % step == 0
    )
