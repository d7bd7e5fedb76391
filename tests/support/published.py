"""Published models: their configurations and their numbers of parameters."""

from __future__ import annotations

from typing import Any

from transformers import Glm4MoeConfig, Qwen2Config, Qwen3MoeConfig

DENSE: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 28}
SMALL = DENSE | {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
#: The models' published configurations, as far as they decide shapes. Checked against copies of their config.json, or
#: fields quoted from them, in public repositories: Qwen3-30B-A3B (a whole copy), Qwen2.5-7B-Instruct and
#: DeepSeek-R1-Distill-Qwen-1.5B (every field here). Of Qwen2.5-Math-1.5B no copy was found: it is trained from
#: Qwen2.5-1.5B, for which a copy and the family's technical report give these sizes and tied embeddings, and the
#: published 1.54 billion parameters are the tied count.
CONFIGS = {
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
    "Qwen2.5-7B-Instruct": Qwen2Config(
        **DENSE,
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    ),
    "Qwen2.5-Math-1.5B": Qwen2Config(**SMALL, vocab_size=151936, tie_word_embeddings=True),
    "DeepSeek-R1-Distill-Qwen-1.5B": Qwen2Config(**SMALL, vocab_size=151936, tie_word_embeddings=False),
    # As the class's defaults and the family's published sizes give it, without its layer for multi-token prediction.
    "GLM-4.5-Air": Glm4MoeConfig(
        architectures=["Glm4MoeForCausalLM"],
        vocab_size=151552,
        hidden_size=4096,
        intermediate_size=10944,
        num_hidden_layers=46,
        num_attention_heads=96,
        num_key_value_heads=8,
        head_dim=128,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=1,
        attention_bias=True,
        rope_theta=1_000_000.0,
        partial_rotary_factor=0.5,
    ),
}
COUNTS = {
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen2.5-Math-1.5B": 1_543_714_304,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "GLM-4.5-Air": 106_852_245_504,
}
