"""Weight mappings on plain tensors."""

from __future__ import annotations

import pytest
import torch
from transformers import Glm4MoeConfig, Qwen2Config

from megatron_fr.errors import ModelError
from megatron_fr.hf.export import hf_tensor_specs
from megatron_fr.models.mappings import QKV, Copy, GatedMLP, RowParallel, Sizes, VocabParallel, WeightMapping
from megatron_fr.models.registry import FAMILIES, model_spec
from tests.support.published import CONFIGS, COUNTS

SIZES = Sizes(layers=2, hidden=6, heads=4, kv_heads=2, head_dim=5, ffn=12, vocab=13, experts=8, moe_ffn=10, top_k=2)
GATED = GatedMLP("fc1", ("gate", "up"), (("ffn", "hidden"),) * 2)
EMBEDDING = VocabParallel("embedding", ("hf",), (("vocab", "hidden"),))
Q_K_V = QKV("qkv", ("q", "k", "v"), (("q_size", "hidden"), ("kv_size", "hidden"), ("kv_size", "hidden")))
MAPPINGS: list[WeightMapping] = [
    Copy("norm", ("hf",), (("hidden",),)),
    EMBEDDING,
    RowParallel("proj", ("hf",), (("hidden", "q_size"),)),
    GATED,
    Q_K_V,
    QKV("qkv", ("q", "k", "v"), (("q_size",), ("kv_size",), ("kv_size",))),
]


def _numbered(mapping: WeightMapping) -> list[torch.Tensor]:
    """Tensors of which every element is different, also between tensors."""
    tensors, first = [], 1
    for shape in mapping.hf_shapes(SIZES):
        count = torch.Size(shape).numel()
        tensors.append(torch.arange(first, first + count, dtype=torch.float32).reshape(shape))
        first += count
    return tensors


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("mapping", MAPPINGS, ids=lambda mapping: type(mapping).__name__)
def test_gathering_undoes_sharding(mapping: WeightMapping, size: int) -> None:
    whole = _numbered(mapping)
    shards = [mapping.shard(whole, SIZES, rank, size) for rank in range(size)]
    assert len({shard.shape for shard in shards}) == 1
    for wanted, found in zip(whole, mapping.gather(shards, SIZES), strict=True):
        assert torch.equal(wanted, found)


def test_qkv_rows_are_grouped_by_kv_head() -> None:
    q, k, v = (torch.full((heads, 5), 0.0) for heads in (4, 2, 2))
    for tensor, base in ((q, 10), (k, 20), (v, 30)):
        tensor += base + torch.arange(len(tensor))[:, None]
    sources = [tensor.reshape(-1, 1).expand(-1, SIZES.hidden) for tensor in (q, k, v)]
    shard = Q_K_V.shard(sources, SIZES, 1, 2)
    assert shard[::5, 0].tolist() == [12, 13, 21, 31]


def test_a_rank_holds_its_chunk_of_gate_above_its_chunk_of_up() -> None:
    gate, up = torch.arange(12.0), 100 + torch.arange(12.0)
    shard = GATED.shard([gate, up], SIZES, 1, 2)
    assert shard.tolist() == [*range(6, 12), *range(106, 112)]


def test_padding_rows_of_the_vocabulary_are_zero_and_never_exported() -> None:
    whole = _numbered(EMBEDDING)
    shards = [EMBEDDING.shard(whole, SIZES, rank, 4) for rank in range(4)]  # 13 rows, padded to 16
    assert [len(shard) for shard in shards] == [4, 4, 4, 4]
    assert not shards[3][1:].any()
    shards[3][1:] = 99
    assert torch.equal(EMBEDDING.gather(shards, SIZES)[0], whole[0])


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Qwen2.5-7B-Instruct", "Qwen2.5-Math-1.5B"])
def test_tensor_specs_have_the_published_number_of_parameters(name: str) -> None:
    specs = hf_tensor_specs(model_spec(CONFIGS[name]), torch.bfloat16)
    assert sum(spec.num_bytes for spec in specs) == 2 * COUNTS[name]
    assert len({spec.name for spec in specs}) == len(specs)


def test_tensors_that_engines_fuse_follow_each_other() -> None:
    config = Qwen2Config(architectures=["Qwen2ForCausalLM"], num_hidden_layers=1)
    names = [name for entry in model_spec(config).parameters() for name in entry.hf]
    for parts in (("q_proj.weight", "k_proj.weight", "v_proj.weight"), ("gate_proj.weight", "up_proj.weight")):
        first = next(i for i, name in enumerate(names) if name.endswith(parts[0]))
        assert [name.split(".", 4)[-1] for name in names[first : first + len(parts)]] == list(parts)


def test_an_unknown_architecture_is_refused_with_the_supported_ones() -> None:
    config = Qwen2Config(architectures=["LlamaForCausalLM"])
    with pytest.raises(ModelError, match=rf"LlamaForCausalLM.*{', '.join(sorted(FAMILIES))}"):
        model_spec(config)


def test_a_mixture_of_experts_is_never_taken_for_a_dense_model() -> None:
    config = Glm4MoeConfig(architectures=["Qwen3ForCausalLM"], rope_theta=1e4)
    with pytest.raises(ModelError, match="unknown") as caught:
        model_spec(config)
    for field in ("rope_parameters.partial_rotary_factor=0.5", "n_routed_experts=128", "n_shared_experts=1"):
        assert field in str(caught.value)


@pytest.mark.parametrize("value", [None, False, 0, 0.0, 1.0, "", [], {}])
def test_an_unknown_field_whose_value_turns_its_feature_off_is_accepted(value: object) -> None:
    config = Qwen2Config(architectures=["Qwen2ForCausalLM"], num_hidden_layers=1, some_feature=value)
    assert model_spec(config).layers == 1


@pytest.mark.parametrize("value", [True, 1, 0.5, "linear", [1], {"a": 0}])
def test_an_unknown_field_with_another_value_is_refused_by_name(value: object) -> None:
    config = Qwen2Config(architectures=["Qwen2ForCausalLM"], num_hidden_layers=1, some_feature=value)
    with pytest.raises(ModelError, match=r"config\.json of a qwen2: some_feature=.* remove it"):
        model_spec(config)


GLM = {"architectures": ["Glm4MoeForCausalLM"], "num_hidden_layers": 3, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
        ({"n_group": 4}, "n_group=4 is not supported"),
        ({"topk_group": 2}, "topk_group=2 is not supported"),
        ({"n_shared_experts": 0}, "n_shared_experts is 0, expected a number above 0"),
        ({"q_lora_rank": 512}, "q_lora_rank=512: unknown"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn' is not supported"),
    ],
)
def test_a_glm_with_another_option_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_spec(Glm4MoeConfig(**GLM | changes))


def test_a_glm_reads_its_dense_layers_and_rotates_half_of_each_head() -> None:
    spec = model_spec(Glm4MoeConfig(**GLM, first_k_dense_replace=2, num_nextn_predict_layers=1))
    assert spec.moe_layers == (2,)
    assert spec.rotary_percent == 0.5
    assert spec.unused_tensors == ("model.layers.3.",)
    held = {entry.param for entry in spec.parameters()}
    assert "decoder.layers.2.mlp.router.expert_bias" in held
    assert "decoder.layers.1.mlp.linear_fc1.weight" in held
    assert "decoder.layers.1.mlp.router.weight" not in held
