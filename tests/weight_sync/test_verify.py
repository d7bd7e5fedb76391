"""Count and checksums of a push: what an engine should hold of it, written out by hand, and how a difference reads."""

from __future__ import annotations

import hashlib
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch

from megatron_fr.errors import SyncError
from megatron_fr.hf.export import hf_tensor_specs
from megatron_fr.models.registry import model_spec
from megatron_fr.models.spec import ModelSpec
from megatron_fr.tiny.model import Family, tiny_config
from megatron_fr.weight_sync.engine_layout import engine_layout, uncheckable, uncheckable_experts
from megatron_fr.weight_sync.verify import PushRecord, difference

Arrays = dict[str, np.ndarray]


def config(family: Family = "qwen3_moe") -> ModelSpec:
    return model_spec(tiny_config(family))


def tensors(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (spec.name, torch.randn(spec.shape, generator=generator).to(dtype)) for spec in hf_tensor_specs(spec, dtype)
    ]


def recorded(
    spec: ModelSpec, named: list[tuple[str, torch.Tensor]], size: int = 1, device: Literal["cpu", "cuda"] = "cuda"
) -> PushRecord:
    record = PushRecord(engine_layout(spec, device), size, checksums=True)
    assert list(record.watch(iter(named))) == named
    return record


def digest(array: np.ndarray) -> str:
    """Of one contiguous array, as SGLang does on a CPU."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()[:8].hex()


def by_hand(weights: Arrays, size: int, rank: int, added: int) -> Arrays:
    """What TP rank ``rank`` of the tiny model's engine stores: 4 heads, 2 KV heads, 8 experts.

    ``added`` rows of zeros make the MLPs' width divisible; experts have them rank by rank.
    """

    def rows(array: np.ndarray, parts: int = size, part: int = rank) -> np.ndarray:
        return np.split(array, parts)[part]

    def wide(array: np.ndarray) -> np.ndarray:
        return rows(np.pad(array, ((0, added), (0, 0))))

    def expert(array: np.ndarray) -> np.ndarray:
        return np.pad(rows(array), ((0, added // size), (0, 0)))

    vocabulary = len(weights["lm_head.weight"])
    kv = (size, rank) if size <= 2 else (2, rank // (size // 2))
    stored: Arrays = {}
    for name, array in weights.items():
        stem = name.split("_proj")[0]
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            stored[name] = rows(np.pad(array, ((0, -vocabulary % 64), (0, 0))))
        elif ".q_proj" in name:
            parts = [rows(array), *(rows(weights[name.replace("q_proj", f"{x}_proj")], *kv) for x in "kv")]
            stored[name.replace("q_proj", "qkv_proj")] = np.concatenate(parts)
        elif ".experts.0.gate_proj" in name:
            experts = [
                [weights[name.replace(".0.gate", f".{e}.{x}")] for x in ("gate", "up", "down")] for e in range(8)
            ]
            prefix = name.split("0.gate")[0]
            stored[f"{prefix}w13_weight"] = np.stack(
                [np.concatenate([expert(gate), expert(up)]) for gate, up, _ in experts]
            )
            stored[f"{prefix}w2_weight"] = np.stack([expert(down.T).T for _, _, down in experts])
        elif ".experts." in name or stem.endswith((".k", ".v", ".up")):
            continue
        elif ".gate_proj" in name:
            up = weights[name.replace("gate_proj", "up_proj")]
            stored[name.replace("gate_proj", "gate_up_proj")] = np.concatenate([wide(array), wide(up)])
        elif stem.endswith(".o"):
            stored[name] = np.split(array, size, axis=1)[rank]
        elif stem.endswith(".down"):
            stored[name] = wide(array.T).T
        else:
            stored[name] = array
    return stored


@pytest.mark.parametrize("family", get_args(Family))
@pytest.mark.parametrize(("device", "size"), [("cuda", 1), ("cuda", 2), ("cuda", 4), ("cpu", 1), ("cpu", 2)])
def test_checksums_are_those_of_what_each_tp_rank_stores(
    family: Family, device: Literal["cpu", "cuda"], size: int
) -> None:
    made = config(family)
    named = tensors(made)
    record = recorded(made, named, size, device)
    weights = {name: tensor.numpy() for name, tensor in named}
    width = 80 if family == "qwen3_moe" else 144
    # On CPUs, SGLang rounds each rank's share up to a multiple of 32.
    added = {("cpu", 80, 1): 16, ("cpu", 144, 1): 16, ("cpu", 80, 2): 48, ("cpu", 144, 2): 48}.get(
        (device, width, size), 0
    )
    for rank in range(size):
        assert record.checksums[rank] == {n: digest(a) for n, a in by_hand(weights, size, rank, added).items()}


def test_checksums_are_of_bytes_in_any_dtype() -> None:
    made = config("qwen3")
    named = tensors(made, torch.bfloat16)
    wanted = digest(dict(named)["model.norm.weight"].view(torch.int16).numpy())
    assert recorded(made, named).checksums[0]["model.norm.weight"] == wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda named: named[:-1],
            "the push has 68 tensors, the model 69; the first that is missing is 'lm_head.weight'",
        ),
        (
            lambda named: named[:3] + named[4:],
            r"tensor 4 of the push is '.*v_proj.weight'; number 4 of the model's 69 is '.*k_",
        ),
        (lambda named: named + named[-1:], "tensor 70 of the push is 'lm_head.weight'; .* is None"),
        (
            lambda named: [("x", named[0][1])],
            "tensor 1 of the push is 'x'; number 1 of the model's 69 is 'model.embed_tokens",
        ),
        (lambda named: [], "the push has 0 tensors"),
    ],
)
def test_a_push_that_lacks_a_tensor_or_has_another_is_refused_before_its_end(change: Any, message: str) -> None:
    made = config()
    named = change(tensors(made))
    for checksums in (True, False):  # the count does not depend on sync.verify
        with pytest.raises(SyncError, match=message):
            list(PushRecord(engine_layout(made, "cpu"), 1, checksums=checksums).watch(iter(named)))


def answer(checksums: list[Arrays] | list[dict[str, str]]) -> dict[str, Any]:
    ranks = [{"checksums": held, "parallelism_info": [{"tp_rank": i}]} for i, held in enumerate(checksums)]
    return {"success": True, "ranks": ranks[::-1]}


def test_a_difference_names_rank_parameter_and_tensors() -> None:
    made = config()
    record = recorded(made, tensors(made), 2)
    assert difference(record, answer(record.checksums), experts=True) is None

    held = [dict(c) for c in record.checksums]
    held[1]["model.layers.1.mlp.experts.w2_weight"] = "0" * 16
    del held[1]["model.norm.weight"]
    held[1]["model.layers.0.extra.weight"] = "0" * 16
    problem = difference(record, answer(held), experts=True)
    assert problem is not None
    assert problem.startswith("3 of 22 parameters of its TP rank 1 are not what was sent: ")
    assert (
        "model.layers.1.mlp.experts.w2_weight (other bytes, of model.layers.1.mlp.experts.0.down_proj.weight to "
        "model.layers.1.mlp.experts.7.down_proj.weight)"
    ) in problem
    assert "model.norm.weight (not in the engine, of model.norm.weight)" in problem
    assert "model.layers.0.extra.weight (only in the engine, which no tensor sent belongs to)" in problem
    # Where the engine's layout of experts is not known, the rest is compared.
    assert "2 of 18" in str(difference(record, answer(held), experts=False))

    for unusable in (answer(record.checksums[:1]), {"success": True}, None, {"ranks": [{"checksums": None}]}):
        assert "not with checksums of 2 TP ranks" in str(difference(record, unusable, experts=True))


def test_engines_whose_layout_is_not_known_are_told_apart() -> None:
    plain = {"dtype": "float32", "quantization": None, "pp_size": 1, "dp_size": 1, "enable_dp_attention": False}
    plain |= {"moe_runner_backend": "auto", "moe_a2a_backend": "none", "ep_size": 1, "ep_num_redundant_experts": 0}
    assert uncheckable(plain, "float32") is None
    assert uncheckable_experts(plain) is None
    assert uncheckable(plain, "bfloat16") == "dtype=float32, while it is sent bfloat16"
    assert uncheckable(plain | {"quantization": "fp8"}, "float32") == "quantization=fp8"
    assert uncheckable(plain | {"pp_size": 2}, "float32") == "pp_size=2"
    assert uncheckable_experts(plain | {"moe_runner_backend": "flashinfer_trtllm"}) == (
        "moe_runner_backend=flashinfer_trtllm"
    )
    assert uncheckable_experts(plain | {"ep_size": 2}) == "ep_size=2"
