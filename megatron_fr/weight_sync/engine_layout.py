"""How an SGLang engine stores the Hugging Face tensors that it is sent: which it fuses, what of them a TP rank holds.

Worked example, Qwen3-MoE with 4 query heads, 2 KV heads and 8 experts on an engine of TP 2: rank 1's
``self_attn.qkv_proj.weight`` is q's heads 2 and 3, k's head 1 and v's head 1, one below the other; its
``mlp.experts.w13_weight`` is, expert after expert, the lower half of gate's rows and the lower half of up's.
Where sizes are rounded up, what is added is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from megatron_fr.errors import ModelError
from megatron_fr.models.mappings import QKV, Copy, GatedMLP, RowParallel, VocabParallel
from megatron_fr.models.sizes import Sizes
from megatron_fr.models.spec import MappedParameter, ModelSpec

#: SGLang rounds the vocabulary up to a multiple of this.
_VOCAB_MULTIPLE = 64
#: And on CPUs each rank's share of an MLP's width.
_CPU_WIDTH_MULTIPLE = 32

#: ``(tensor, rank, size)`` to the part of the tensor that TP rank ``rank`` of ``size`` stores.
Cut = Callable[[torch.Tensor, int, int], torch.Tensor]


@dataclass(frozen=True)
class Stored:
    """Where the engine puts one Hugging Face tensor.

    Attributes:
        param: the engine's parameter. Its bytes are those of its tensors' parts, one after the other in the order in
            which the bridge streams them.
        last: whether the tensor is the parameter's last.
        expert: whether it is an expert's.
    """

    param: str
    cut: Cut
    last: bool
    expert: bool


def engine_layout(spec: ModelSpec, device: Literal["cpu", "cuda"]) -> dict[str, Stored]:
    """Every Hugging Face tensor of a model, in the order in which the bridge streams them.

    Args:
        device: of the engine.

    Raises:
        ModelError: the model's architecture has no mapping, or one with a kind of rule that is unknown here.
    """
    width = _CPU_WIDTH_MULTIPLE if device == "cpu" else 1
    named = [found for entry in spec.parameters() for found in _stored(entry, spec, width)]
    final = {param: name for name, param, _ in named}
    return {
        name: Stored(param, cut, last=final[param] == name, expert=".experts." in param) for name, param, cut in named
    }


def uncheckable(info: dict[str, Any], dtype: str) -> str | None:
    """Why nothing of what an engine stores can be told from what it was sent, or None.

    Args:
        info: its ``/server_info``.
        dtype: of the tensors that it is sent, torch's name without the prefix.
    """
    if info.get("dtype") not in ("auto", dtype):
        return f"dtype={info.get('dtype')}, while it is sent {dtype}"
    for field, plain in (
        ("quantization", (None,)),
        ("torchao_config", (None, "")),
        ("pp_size", (1,)),
        ("dp_size", (1,)),
        ("enable_dp_attention", (False,)),
        ("attn_cp_size", (1,)),
        ("moe_dense_tp_size", (None,)),
        ("model_impl", ("auto", "sglang")),
    ):
        if field in info and info[field] not in plain:
            return f"{field}={info[field]}"
    return None


def uncheckable_experts(info: dict[str, Any]) -> str | None:
    """The same of the experts' weights alone: backends may permute them, and expert parallelism deals them out."""
    for field, plain in (
        ("moe_runner_backend", ("auto", "triton")),
        ("moe_a2a_backend", (None, "none")),
        ("ep_size", (1,)),
        ("ep_num_redundant_experts", (0,)),
    ):
        if field in info and info[field] not in plain:
            return f"{field}={info[field]}"
    return None


def _stored(entry: MappedParameter, dims: Sizes, width: int) -> list[tuple[str, str, Cut]]:
    """``(Hugging Face name, engine's parameter, cut)`` of an entry's tensors."""
    first, rule = entry.hf[0], entry.mapping
    experts = first.rpartition(f".{entry.expert}.")[0] if rule.per_expert else None
    match rule:
        case Copy():
            return [(first, first, _whole)]
        case VocabParallel():
            return [(first, first, _vocabulary)]
        case RowParallel():
            if experts:
                return [(first, f"{experts}.w2_weight", partial(_expert_columns, width))]
            return [(first, first, partial(_columns, 1 if rule.shape[1] == "q_size" else width))]
        case GatedMLP():
            if experts:
                return [(name, f"{experts}.w13_weight", partial(_expert_rows, width)) for name in entry.hf]
            return [(name, first.replace("gate_proj", "gate_up_proj"), partial(_rows, width)) for name in entry.hf]
        case QKV():
            param, kv = first.replace("q_proj", "qkv_proj"), partial(_kv_rows, dims.kv_heads)
            return [(name, param, cut) for name, cut in zip(entry.hf, (partial(_rows, 1), kv, kv), strict=True)]
    raise ModelError(
        f"{first}: no engine layout is known for rules of the kind {type(rule).__name__}; add it to {__name__}"
    )


def _whole(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return tensor


def _vocabulary(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return _piece(tensor, -(-len(tensor) // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE // size, rank)


def _rows(multiple: int, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """A rank's rows, whose number is rounded up to a multiple of ``multiple``."""
    return _piece(tensor, -(-len(tensor) // (multiple * size)) * multiple, rank)


def _columns(multiple: int, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return _rows(multiple, tensor.T, rank, size).T


def _expert_rows(multiple: int, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """As :func:`_rows`, but every rank's share is the same, each with zeros below it."""
    return _piece(_rows(1, tensor, rank, size), -(-len(tensor) // (multiple * size)) * multiple, 0)


def _expert_columns(multiple: int, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return _expert_rows(multiple, tensor.T, rank, size).T


def _kv_rows(heads: int, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    copies = max(1, size // heads)  # with more ranks than heads, neighbours hold the same head
    return _rows(1, tensor, rank // copies, size // copies)


def _piece(tensor: torch.Tensor, rows: int, index: int) -> torch.Tensor:
    """Rows ``index * rows`` and following, zero where the tensor has ended."""
    held = tensor[index * rows : (index + 1) * rows]
    if len(held) == rows:
        return held
    return torch.cat([held, held.new_zeros(rows - len(held), *tensor.shape[1:])])
