"""Model families by Hugging Face architecture name, and their rules written out for one model."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_fr.errors import ModelError
from megatron_fr.models.common import EMBEDDING, FINAL_NORM, HEAD
from megatron_fr.models.dims import Dims
from megatron_fr.models.mappings import Rule

#: Modules of this package that register a family.
FAMILY_MODULES = ("qwen2", "qwen3", "qwen3_moe")

_families: dict[str, Family] = {}


@dataclass(frozen=True)
class Family:
    """What models of one architecture have in common.

    Attributes:
        architecture: as in ``config.json``.
        layer_rules: the rules that every layer has, in the order in which tensors are streamed.
        dense_rules: those of a layer whose MLP is dense; they follow.
        moe_rules: those of a layer whose MLP is a mixture of experts; empty where the family has none.
        qkv_bias: q, k and v have biases.
        qk_norm: queries and keys are normalised.
    """

    architecture: str
    layer_rules: tuple[Rule, ...]
    dense_rules: tuple[Rule, ...]
    moe_rules: tuple[Rule, ...] = ()
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def moe(self) -> bool:
        """Whether its MLPs are mixtures of experts, in all layers or some."""
        return bool(self.moe_rules)


@dataclass(frozen=True)
class Entry:
    """A rule for one layer and one expert.

    Attributes:
        param, hf: names with the indices filled in.
        layer, expert: global indices from 0; None where there is none.
    """

    rule: Rule
    param: str
    hf: tuple[str, ...]
    layer: int | None = None
    expert: int | None = None


def register(family: Family) -> None:
    """Add a family; each family module calls it once."""
    _families[family.architecture] = family


def supported_architectures() -> list[str]:
    """Names that :func:`family_of` accepts."""
    for name in FAMILY_MODULES:
        importlib.import_module(f"megatron_fr.models.{name}")
    return sorted(_families)


def check_architectures(architectures: Any, where: str = "config.json") -> str:
    """The first of the architectures in a ``config.json`` that has a family.

    Args:
        where: the file, for the message.

    Raises:
        ModelError: none has, or it is no list of names.
    """
    supported = supported_architectures()
    if isinstance(architectures, list):
        for name in architectures:
            if name in supported:
                return str(name)
    raise ModelError(f"{where}: model architecture {architectures} has no mapping; supported: {', '.join(supported)}")


def family_of(hf_config: Any) -> Family:
    """The family of a transformers configuration.

    Raises:
        ModelError: no family has this architecture.
    """
    return _families[check_architectures(list(getattr(hf_config, "architectures", None) or []))]


def is_tied(hf_config: Any) -> bool:
    """Whether the head is the embedding."""
    return bool(getattr(hf_config, "tie_word_embeddings", False))


def entries(hf_config: Any) -> Iterator[Entry]:
    """Every rule of the whole model with its names, in the fixed order of loading, saving and synchronising."""
    family, dims = family_of(hf_config), Dims.from_hf(hf_config)
    yield from (Entry(rule, rule.param, rule.hf) for rule in EMBEDDING)
    moe_layers = set(dims.moe_layers)
    for layer in range(dims.layers):
        rules = family.layer_rules + (family.moe_rules if layer in moe_layers else family.dense_rules)
        experts = [rule for rule in rules if rule.per_expert]
        yield from (_entry(rule, layer, None) for rule in rules if not rule.per_expert)
        for expert in range(dims.experts if experts else 0):
            yield from (_entry(rule, layer, expert) for rule in experts)
    yield from (Entry(rule, rule.param, rule.hf) for rule in FINAL_NORM)
    if not is_tied(hf_config):
        yield Entry(HEAD, HEAD.param, HEAD.hf)


def _entry(rule: Rule, layer: int, expert: int | None) -> Entry:
    def fill(name: str) -> str:
        return name.format(layer=layer, expert=expert)

    return Entry(rule, fill(rule.param), tuple(fill(name) for name in rule.hf), layer, expert)
