"""What the rest of the package knows of a model, built once from its configuration."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_fr.models.mappings import Copy, Sizes, VocabParallel, WeightMapping

EMBEDDING = VocabParallel("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), (("vocab", "hidden"),))
FINAL_NORM = Copy("decoder.final_layernorm.weight", ("model.norm.weight",), (("hidden",),))
HEAD = VocabParallel("output_layer.weight", ("lm_head.weight",), (("vocab", "hidden"),))


@dataclass(frozen=True)
class MappedParameter:
    """A weight mapping for one layer and one expert.

    Attributes:
        param, hf: names with the indices filled in.
        layer, expert: global indices from 0; None where there is none.
    """

    mapping: WeightMapping
    param: str
    hf: tuple[str, ...]
    layer: int | None = None
    expert: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Sizes):
    """One model; everything that distinguishes it from another model, but not its weights.

    Attributes:
        architecture: the name in ``config.json``.
        attention, dense_mlp, moe_mlp: weight mappings of a layer's attention, and of its MLP of either kind.
        tie: the head is the embedding.
        qkv_bias: q, k and v have biases.
        qk_norm: queries and keys are normalised.
        norm_eps: added to the mean square in every RMSNorm.
        rope_theta, rotary_percent: base of the rotary embedding, and the share of a head's elements that it rotates.
        max_positions: the longest sequence.
        transformer: further fields of Megatron-Core's ``TransformerConfig``.
        unused_tensors: prefixes of tensors in a Hugging Face folder that the model does without.
        unserved: why SGLang cannot serve it; None where it can.
        quantized: the folder says that its weights are quantised.
    """

    architecture: str
    attention: tuple[WeightMapping, ...]
    dense_mlp: tuple[WeightMapping, ...]
    moe_mlp: tuple[WeightMapping, ...] = ()
    tie: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_eps: float
    rope_theta: float
    rotary_percent: float = 1.0
    max_positions: int
    transformer: Mapping[str, Any] = field(default_factory=dict, hash=False)
    unused_tensors: tuple[str, ...] = ()
    unserved: str | None = None
    quantized: bool = False

    def parameters(self) -> Iterator[MappedParameter]:
        """Every parameter of the whole model, in the fixed order of loading, saving and synchronising."""
        yield _fill(EMBEDDING)
        for layer in range(self.layers):
            weights = self.attention + (self.moe_mlp if layer in self.moe_layers else self.dense_mlp)
            for expert in (None, *range(self.experts)):
                yield from (_fill(one, layer, expert) for one in weights if one.per_expert == (expert is not None))
        yield _fill(FINAL_NORM)
        if not self.tie:
            yield _fill(HEAD)

    def identity(self) -> dict[str, Any]:
        """What must be equal for weights of one model to be of use in another, as JSON has it."""
        names = ["architecture", "tie", "norm_eps", "rope_theta", "rotary_percent"]
        found = {name: getattr(self, name) for name in (*(size.name for size in fields(Sizes)), *names)}
        return found | {"moe_layers": list(self.moe_layers)} | dict(self.transformer)


def _fill(mapping: WeightMapping, layer: int | None = None, expert: int | None = None) -> MappedParameter:
    param, *hf = (name.format(layer=layer, expert=expert) for name in (mapping.param, *mapping.hf))
    return MappedParameter(mapping, param, tuple(hf), layer, expert)
