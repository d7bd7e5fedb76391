"""Hugging Face to Megatron and back, through the tools: the folder that comes out serves as the one that went in."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from megatron_fr.engines.engine import Engine, EngineSpec
from megatron_fr.rollout.session import EngineSession
from megatron_fr.trajectory import ModelLimits, Trajectory
from tests.rollout.test_session import connect, finish
from tools.tiny import make_untrained

TOOLS = Path(__file__).resolve().parents[2] / "tools"
VOCAB = 515  # odd: TP 2 pads it
CHAT = [
    {"role": "system", "content": "You can run Python."},
    {"role": "user", "content": "What is 17 + 25?"},
    {"role": "assistant", "content": "42"},
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """``(source, converted)`` of a tied and an untied model."""
    root = tmp_path_factory.mktemp("chain")
    found = {}
    for name, family, split in (("tied", "qwen2", "1"), ("untied", "qwen3_moe", "4")):
        source = make_untrained(root / name, family=family, vocab_size=VOCAB, tie=name == "tied", seed=3)
        run_tool("convert_hf_to_megatron.py", source, root / f"{name}-megatron", "--tp", "2", "--ep", split, "--verify")
        run_tool("convert_megatron_to_hf.py", root / f"{name}-megatron", root / f"{name}-hf", "--verify")
        found[name] = source, root / f"{name}-hf"
    return found


def logprobs(folder: Path, tokens: list[int]) -> np.ndarray:
    """Of every token after the tokens so far ``[N, vocabulary]``, by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return np.asarray(model(torch.tensor([tokens])).logits[0].log_softmax(-1))


def run_tool(name: str, *arguments: object) -> None:
    subprocess.run([sys.executable, TOOLS / name, *map(str, arguments)], check=True, timeout=200)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_transformers_loads_it_complete_and_computes_the_same(folders: dict[str, tuple[Path, Path]], name: str) -> None:
    source, converted = folders[name]
    model, info = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == (name == "tied")
    assert model.lm_head.weight.shape == (VOCAB, 96)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 200).tolist()
    np.testing.assert_allclose(logprobs(converted, tokens), logprobs(source, tokens), atol=1e-6)

    ours, theirs = AutoTokenizer.from_pretrained(converted), AutoTokenizer.from_pretrained(source)
    text = ours.apply_chat_template(CHAT, tokenize=False)
    assert "17 + 25" in text
    assert text == theirs.apply_chat_template(CHAT, tokenize=False)
    assert ours.encode(text) == theirs.encode(text)
    assert ours.eos_token_id == theirs.eos_token_id
    generation = GenerationConfig.from_pretrained(converted)
    assert generation.to_dict() == GenerationConfig.from_pretrained(source).to_dict()
    assert generation.eos_token_id == ours.eos_token_id


def test_an_engine_that_serves_it_reports_the_log_probabilities_of_the_source(
    folders: dict[str, tuple[Path, Path]], spec: Callable[..., EngineSpec]
) -> None:
    source, converted = folders["tied"]  # the head is not in its files
    limits = ModelLimits(vocab_size=VOCAB, max_context=512)
    tokenizer = AutoTokenizer.from_pretrained(converted)
    ids = tokenizer.apply_chat_template(CHAT[:2], add_generation_prompt=True, return_dict=False)

    async def run() -> list[Trajectory]:
        server = Engine(spec(model_path=str(converted), max_context=512, return_routes=False))
        await server.start()
        try:
            async with connect(server, limits, ignore_eos=True) as client:

                async def one(seed: int) -> Trajectory:
                    session = EngineSession(client, limits, max_new_tokens=120, want_routes=False)
                    session.observe([*ids, seed])
                    await session.generate(stop_token_ids=[])
                    return finish(session)

                return list(await asyncio.gather(*(one(seed) for seed in range(8))))
        finally:
            await server.stop()

    for trajectory in asyncio.run(run()):
        assert trajectory.num_action_tokens == 120
        trajectory.validate(limits)
        tokens = trajectory.tokens.tolist()
        wanted = logprobs(source, tokens)[np.arange(len(tokens) - 1), tokens[1:]]
        acted = trajectory.action_mask[1:]
        np.testing.assert_allclose(trajectory.behavior_logprobs[1:][acted], wanted[acted], atol=1e-4)
