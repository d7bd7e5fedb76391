"""Tiny models with a batch and transformers' answer to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.tiny import make_untrained
from tools.tiny.model import build_untrained, save, tiny_config
from tools.tiny.tokenizer import make_tokenizer

#: name: make_untrained's arguments. ``moe_unnormed`` has ``norm_topk_prob`` false, ``moe_top1`` one expert a token,
#: ``moe_mixed`` experts in its second layer only; ``glm_plain`` has none of the biases and norms of ``glm``, two dense
#: layers and two shared experts. Vocabulary 515 is odd, so that TP 2 needs a padding row.
MODELS: dict[str, dict[str, Any]] = {
    "moe": {"family": "qwen3_moe", "num_layers": 4, "vocab_size": 515},
    "moe_tied": {"family": "qwen3_moe", "tie": True},
    "moe_unnormed": {"family": "qwen3_moe"},
    "moe_top1": {"family": "qwen3_moe"},
    "moe_mixed": {"family": "qwen3_moe", "num_layers": 4, "vocab_size": 515},
    "qwen3": {"family": "qwen3", "vocab_size": 515},
    "qwen3_tied": {"family": "qwen3", "tie": True, "vocab_size": 515},
    "glm": {"family": "glm4_moe", "num_layers": 4, "vocab_size": 515},
    "glm_plain": {"family": "glm4_moe", "num_layers": 4, "tie": True},
    "qwen2": {"family": "qwen2"},
    "qwen2_tied": {"family": "qwen2", "tie": True},
}
CHANGES: dict[str, dict[str, Any]] = {
    "moe_top1": {"num_experts_per_tok": 1},
    "moe_mixed": {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "glm_plain": {
        "attention_bias": False,
        "use_qk_norm": False,
        "first_k_dense_replace": 2,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
    },
}


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of :data:`MODELS`, each with ``batch.pt``: ids, mask of real tokens, float32 log-probabilities."""
    root = tmp_path_factory.mktemp("tiny")
    return {name: _make(root / name, arguments) for name, arguments in MODELS.items()}


def _make(folder: Path, arguments: dict[str, Any]) -> Path:
    if folder.name in CHANGES:
        config = tiny_config(**arguments)
        config.update(CHANGES[folder.name])
        folder.mkdir()
        save(build_untrained(config), make_tokenizer(), folder)
    else:
        make_untrained(folder, **arguments)
    if folder.name == "moe_unnormed":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False}))
    write_reference(folder)
    return folder


def write_reference(folder: Path) -> None:
    """Ask transformers about a right-padded batch of three sequences, and keep the answer beside the model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    lengths, width = (24, 17, 9), 24
    ids = torch.randint(0, model.config.vocab_size, (3, width), generator=torch.Generator().manual_seed(7))
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        logprobs = model(ids, attention_mask=mask.long()).logits.log_softmax(-1)
    torch.save({"ids": ids, "mask": mask, "logprobs": logprobs}, folder / "batch.pt")
