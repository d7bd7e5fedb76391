"""Where a whole parameter lies in a Megatron torch_dist checkpoint.

A checkpoint is independent of the layout that wrote it: it has tensors of the whole model's size under keys, stored in
the pieces that the ranks held. A layer's parameter has either a key of its own
(``decoder.layers.3.self_attention.linear_qkv.weight``) or a row in a tensor of all layers
(``decoder.layers.self_attention.linear_qkv.weight``, Megatron's older naming of uniform layers); experts always are
rows of one tensor (``...mlp.experts.experts.linear_fc1.weight``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_fr.models.spec import MappedParameter

_LAYER = re.compile(r"^decoder\.layers\.\d+\.")
_EXPERT = re.compile(r"\.experts\.local_experts\.\d+\.")


@dataclass(frozen=True)
class Location:
    """A key, and the indices along the leading axes of its tensor at which the parameter lies."""

    key: str
    lead: tuple[int, ...] = ()


def candidates(entry: MappedParameter) -> list[Location]:
    """Every place at which Megatron-Core may have put a parameter; the first is the one that is written here.

    Megatron names the norms of its local layers as Transformer Engine's layers have them, inside the linear layer that
    follows; before experts there is no such layer, yet its local layers do it there too, unless told otherwise.
    """
    found: list[Location] = []
    for key in _norm_names(entry.param):
        expert = () if entry.expert is None else (entry.expert,)
        key = _EXPERT.sub(".experts.experts.", key)
        found.append(Location(key, expert))
        if entry.layer is not None:
            found.append(Location(_LAYER.sub("decoder.layers.", key), (entry.layer, *expert)))
    return found


def _norm_names(param: str) -> list[str]:
    if param.endswith(".input_layernorm.weight"):
        fused = param.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        return [fused, param]
    if param.endswith(".pre_mlp_layernorm.weight"):
        return [param, param.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")]
    return [param]


def written_at(entry: MappedParameter, *, moe: bool) -> Location:
    """Where this package writes a parameter; ``moe`` says whether its layer has experts."""
    found = candidates(entry)
    if entry.param.endswith(".pre_mlp_layernorm.weight") and not moe:
        return next(place for place in found if ".linear_fc1.layer_norm_" in place.key and not place.lead)
    return found[0]
