"""Real servers for these tests: each starts once a session, with the tiny untrained Qwen3-MoE."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_fr.engines.engine import Engine, EngineSpec
from megatron_fr.trajectory import ModelLimits
from tests.support.processes import family_of, wait_gone
from tools.tiny import make_untrained

MAX_CONTEXT = 1024
#: Prompts above this many tokens are processed in parts.
PREFILL_CHUNK = 96


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two folders of one architecture with different random weights."""
    folder = tmp_path_factory.mktemp("models")
    return [make_untrained(folder / name, seed=seed) for name, seed in (("a", 1), ("b", 2))]


@pytest.fixture(scope="session")
def limits() -> ModelLimits:
    from tools.tiny.model import VOCAB_SIZE

    return ModelLimits(vocab_size=VOCAB_SIZE, max_context=MAX_CONTEXT, num_moe_layers=2, top_k=2, num_experts=8)


@pytest.fixture(scope="session")
def spec(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., EngineSpec]:
    logs = tmp_path_factory.mktemp("logs")
    count = iter(range(1000))

    def make(**changes: Any) -> EngineSpec:
        fields = {
            "model_path": str(models[0]),
            "log_path": logs / f"engine-{next(count)}.log",
            "device": "cpu",
            "dtype": "float32",
            "max_context": MAX_CONTEXT,
        }
        return EngineSpec(**{**fields, **changes})

    return make


@pytest.fixture(scope="session")
def engine(spec: Callable[..., EngineSpec]) -> Iterator[Engine]:
    """A running server with routes. Tests that change its weights put the first model back."""
    server = Engine(spec(args={"chunked-prefill-size": PREFILL_CHUNK}))
    asyncio.run(server.start())
    family = family_of(server.pid)
    assert len(family) > 1  # the server has processes of its own
    yield server
    started = time.monotonic()
    asyncio.run(server.stop())
    assert time.monotonic() - started < 3.5
    assert not wait_gone(family, 0)
