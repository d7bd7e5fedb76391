"""Tiny models whose sizes are all different, so that no wrong transpose or mix-up goes unseen."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Literal

from tools.tiny.tokenizer import TOKENIZER_SIZE, make_tokenizer

Family = Literal["qwen3_moe", "qwen3", "qwen2", "glm4_moe"]

#: Rows of the embedding: above the tokenizer's size, divisible by 2 and by neither 4 nor 128.
VOCAB_SIZE = TOKENIZER_SIZE + 8


def tiny_config(
    family: Family = "qwen3_moe",
    *,
    num_layers: int = 2,
    num_experts: int = 8,
    tie: bool = False,
    vocab_size: int = VOCAB_SIZE,
) -> Any:
    """The transformers configuration of a tiny model.

    Hidden 96; 4 heads and 2 KV heads of size 32 (Qwen2: 24, which is hidden / heads there); experts 80 wide, top-2,
    ``norm_topk_prob``; dense MLPs 144 wide; float32. GLM: the first layer dense, all its options on.
    """
    from transformers import Glm4MoeConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 96,
        "intermediate_size": 144,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": tie,
        "dtype": "float32",
    }
    if family == "glm4_moe":
        common["rope_parameters"]["partial_rotary_factor"] = 0.5
        common |= {"head_dim": 32, "num_nextn_predict_layers": 0}  # transformers takes them as free attributes
        return Glm4MoeConfig(
            **common,
            architectures=["Glm4MoeForCausalLM"],
            moe_intermediate_size=80,
            n_routed_experts=num_experts,
            num_experts_per_tok=2,
            n_shared_experts=1,
            first_k_dense_replace=1,
            routed_scaling_factor=1.5,
            attention_bias=True,
            use_qk_norm=True,
        )
    if family == "qwen2":
        return Qwen2Config(**common, architectures=["Qwen2ForCausalLM"])
    if family == "qwen3":
        return Qwen3Config(**common, architectures=["Qwen3ForCausalLM"], head_dim=32)
    common["head_dim"] = 32  # transformers takes it as a free attribute
    return Qwen3MoeConfig(
        **common,
        architectures=["Qwen3MoeForCausalLM"],
        moe_intermediate_size=80,
        num_experts=num_experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        router_aux_loss_coef=0.0,
    )


def build_untrained(config: Any, *, seed: int = 0, std: float = 0.08) -> Any:
    """A model with random weights in float32; the same seed gives the same weights.

    Unlike a library's initialisation, norms, biases and every other parameter are random, so that a parameter that is
    lost or mapped to the wrong place changes the outputs.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias"))
        for name, parameter in itertools.chain(model.named_parameters(), biases):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if name.endswith("norm.weight") else std * noise)
    return model.eval()


def save(model: Any, tokenizer: Any, out_dir: str | Path) -> None:
    """Write a complete folder: weights, configuration, generation configuration, tokenizer, chat template."""
    from transformers import GenerationConfig

    stop, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.config.eos_token_id, model.config.pad_token_id = stop, pad
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=pad, do_sample=True, temperature=1.0)
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)


def make_untrained(
    out_dir: str | Path,
    *,
    num_layers: int = 2,
    num_experts: int = 8,
    dense: bool = False,
    tie: bool = False,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    family: Family | None = None,
) -> Path:
    """Write a tiny model with random weights, complete with tokenizer and chat template, in about a second.

    Args:
        num_layers: decoder layers.
        num_experts: experts of each layer that has them.
        dense: a Qwen2 with QKV biases in place of the Qwen3-MoE.
        tie: tie ``lm_head`` to the embeddings.
        vocab_size: rows of the embedding, not below ``TOKENIZER_SIZE`` = 506.
        seed: of the weights.
        family: names the architecture in place of ``dense``; ``qwen3`` is dense with QK norms.

    Returns:
        ``out_dir`` as a path.
    """
    if vocab_size < TOKENIZER_SIZE:
        raise ValueError(f"vocab_size={vocab_size} is below the tokenizer's {TOKENIZER_SIZE} tokens; raise it")
    chosen: Family = family or ("qwen2" if dense else "qwen3_moe")
    config = tiny_config(chosen, num_layers=num_layers, num_experts=num_experts, tie=tie, vocab_size=vocab_size)
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    save(build_untrained(config, seed=seed), make_tokenizer(), out)
    return out
