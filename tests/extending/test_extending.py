"""The examples of docs/extending.md, run as they stand there through the product's own pieces."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
import yaml
from aiohttp import web

from megatron_fr.agents import Prompt, RewardInput
from megatron_fr.agents.registry import make_agent
from megatron_fr.agents.rewards import RewardRunner
from megatron_fr.algorithm import RewardBatch
from megatron_fr.config import RunConfig, load_config
from megatron_fr.engines.client import EngineClient
from megatron_fr.engines.fleet import Fleet
from megatron_fr.rollout.evaluate import evaluate_sets, load_held_out
from megatron_fr.rollout.session import EpisodeRunner
from megatron_fr.trainer.data.batch import build_micro_batch
from megatron_fr.trainer.objective import BatchConstants, Objective
from megatron_fr.trajectory import ModelLimits, Trajectory
from tests.support.samples import trajectory
from tools.tiny import make_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
FILES = {
    match[1]: match[0]
    for match in re.finditer(r"(?<=```python\n)# (\w+\.py), on PYTHONPATH\n.*?(?=```)", PAGE, flags=re.S)
}
YAML = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.S)


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """Writes the page's files into a folder on the path; loads a run with the page's YAML that names one of them."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def load(mentions: str, *overrides: str) -> RunConfig:
        (block,) = [text for text in YAML if mentions in text]
        values: dict[str, Any] = {
            "model": {"path": "unused"},
            "train": {"num_updates": 1, "batch_size": 4},
            "rollout": {"max_context": 512, "max_new_tokens": 64},
            "agent": {"kind": "single_turn"},
            "reward": {"function": "strict_reward:exact"},
            "data": {"train": "train.jsonl"},
            **yaml.safe_load(block),
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        return load_config(tmp_path / "run.yaml", overrides)

    return load


def test_the_page_has_an_example_of_each_seam() -> None:
    assert {"level_advantage.py", "sequence_ratio.py", "guess_number.py", "strict_reward.py", "judge_reward.py"} <= set(
        FILES
    )


def test_advantage(configured: Callable[..., RunConfig]) -> None:
    objective = Objective(configured("level_advantage:").algorithm)
    batch = RewardBatch(
        rewards=torch.tensor([1.0, 0.0, 1.0, 0.5], dtype=torch.float64),
        metadata=[{"level": "easy"}, {"level": "hard"}, {"level": "easy"}, {"level": "hard"}],
    )
    assert objective.advantages(batch) == ([0.0, -0.25, 0.0, 0.25], True)
    # Rounding in a mean is no signal: 0.1 three times.
    equal = RewardBatch(rewards=torch.full((3,), 0.1, dtype=torch.float64), metadata=[{}] * 3)
    assert objective.advantages(equal)[1] is False


def test_loss(configured: Callable[..., RunConfig]) -> None:
    config = configured("sequence_ratio:")
    assert config.algorithm.group_size == 4
    logmu = [np.array([0, 0, -1, -2], np.float32), np.array([0, 0, -3, -1], np.float32)]
    samples = [trajectory(f"t{i}", behavior_logprobs=values) for i, values in enumerate(logmu)]
    advantages = [0.5, -0.5]
    batch = build_micro_batch(samples, advantages)
    logpi = torch.tensor([[0.0, -0.995, -2.0], [0.0, -3.0, -1.2]], requires_grad=True)
    entropy = torch.zeros_like(logpi)
    loss, stats, own = Objective(config.algorithm).loss(batch, logpi, entropy, BatchConstants(2, 4))
    loss.backward()

    # GSPO as its paper writes it, with the gradient through the ratio.
    wanted = logpi.detach().double().requires_grad_()
    mask = torch.tensor([[False, True, True]] * 2)
    mu = torch.tensor(np.stack(logmu))[:, 1:].double()
    ratio = (torch.where(mask, wanted - mu, 0.0).sum(1) / 2).exp()
    signed = torch.tensor(advantages, dtype=torch.float64)
    objective = torch.minimum(ratio * signed, ratio.clamp(1 - 0.01, 1 + 0.01) * signed)
    (-objective.sum() / 2).backward()
    assert ratio.tolist() == pytest.approx([1.0025, 0.9048], abs=1e-4)
    assert logpi.grad is not None
    assert wanted.grad is not None
    torch.testing.assert_close(logpi.grad.double(), wanted.grad, atol=1e-6, rtol=1e-6)
    assert stats.admitted.tolist() == [True, False]
    assert float(own["clipped_tokens"]) == 0.5


class ScriptedEngine:
    """An HTTP server in an engine's place, which samples what ``say`` makes of the conversation so far."""

    def __init__(self, say: Callable[[str], str]) -> None:
        self.tokenizer = make_tokenizer()
        self.temperatures: list[float] = []
        self._say = say

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.temperatures.append(body["sampling_params"]["temperature"])
        text = self._say(self.tokenizer.decode(body["input_ids"])) + "<|im_end|>"
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        meta = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "weight_versions": [{"version": "0", "start": 0, "end": len(tokens)}],
        }
        return web.json_response({"output_ids": tokens, "meta_info": meta})

    @asynccontextmanager
    async def episodes(self, config: RunConfig) -> AsyncIterator[EpisodeRunner]:
        """Plays episodes on this engine, as the rollout service does."""
        limits = ModelLimits(len(self.tokenizer), config.rollout.max_context)
        rewards = RewardRunner(config.reward, Path("logs/reward.log"))
        await rewards.start()
        try:
            async with serve("/generate", self.generate) as url, aiohttp.ClientSession() as http:
                fleet = Fleet([], limits, temperature=1.0, request_timeout_s=10)
                fleet.clients = [EngineClient(url, http, limits=limits, temperature=1.0, timeout_s=10)]
                agent = make_agent(config.agent, self.tokenizer)
                yield EpisodeRunner(fleet, agent, rewards, limits, config.rollout, want_routes=False)
        finally:
            await rewards.stop()


@asynccontextmanager
async def serve(path: str, handler: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post(path, handler)
    server = web.AppRunner(app, shutdown_timeout=0.1)
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{server.addresses[0][1]}"
    finally:
        await server.cleanup()


def test_agent(configured: Callable[..., RunConfig]) -> None:
    def halve(conversation: str) -> str:
        """Guesses by what it was told last."""
        return "25" if "lower" in conversation else "50"

    async def main(config: RunConfig, **changes: Any) -> Trajectory:
        prompt = Prompt("p", ({"role": "user", "content": "Guess."},), 25, {"level": 3, "tests": "x" * 5000}, **changes)
        async with ScriptedEngine(halve).episodes(config) as episodes:
            return await episodes.run(prompt, trajectory_id="t", group_id="t")

    config = configured("guess_number:")
    assert config.reward.function is None
    played = asyncio.run(main(config))
    assert (played.reward, played.reward_parts) == (1.25, {"solved": 1.0})
    assert (played.finish_reason, played.num_turns, played.info) == ("env_done", 2, {"guesses": 2})
    assert played.metadata == {"level": 3}  # what is too large stays behind
    limited = asyncio.run(main(configured("guess_number:", "agent.max_turns=1")))
    assert (limited.reward, limited.reward_parts) == (0.0, {"solved": 0.0})


def episode(text: str, **fields: Any) -> RewardInput:
    prompt = Prompt("p7", ({"role": "user", "content": "6 * 7?"},), 42)
    return RewardInput(prompt, prompt.messages, text, "stop", 0, 0, **fields)


def score(config: RunConfig, *episodes: RewardInput) -> list[Any]:
    async def main() -> list[Any]:
        runner = RewardRunner(config.reward, Path("logs/reward.log"))
        await runner.start()
        try:
            return await asyncio.gather(*map(runner.score, episodes), return_exceptions=True)
        finally:
            await runner.stop()

    return asyncio.run(main())


def test_reward(configured: Callable[..., RunConfig]) -> None:
    config = configured("strict_reward:exact")
    right, wrong = score(config, episode(" 42", num_turns=2), episode("41", num_turns=1))
    assert right == (pytest.approx(0.8), {"right": 1.0})
    assert wrong == (pytest.approx(-0.1), {"right": 0.0})
    assert "prompt 'p7': scored\nexpected 42, got '41'\n" in Path("logs/reward.log").read_text()


def test_async_reward(configured: Callable[..., RunConfig]) -> None:
    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        if body["answer"] == "slow":
            await asyncio.sleep(60)
        if body["answer"] == "broken":
            return web.json_response({})
        return web.json_response({"score": float(body == {"question": "6 * 7?", "answer": "42"})})

    async def main() -> list[Any]:
        async with serve("/score", answer) as url:
            config = configured("judge_reward:", f"reward.args={{url: '{url}/score'}}", "reward.timeout_s=0.5")
            runner = RewardRunner(config.reward, Path("logs/reward.log"))
            await runner.start()
            texts = ("42", "41", "slow", "broken")
            return await asyncio.gather(
                *(runner.score(episode(text, num_action_tokens=5)) for text in texts), return_exceptions=True
            )

    right, wrong, slow, broken = asyncio.run(main())
    assert right == (1.0, {"short": 1.0})
    assert wrong == (0.0, {"short": 1.0})
    assert "took longer than 0.5 s; raise reward.timeout_s=0.5" in str(slow)
    line = FILES["judge_reward.py"].split("\n").index('        score = (await response.json())["score"]') + 1
    assert f"judge_reward.py:{line}" in str(broken)
    log = Path("logs/reward.log").read_text()
    assert "KeyError: 'score'" in log
    assert f'judge_reward.py", line {line}' in log


def test_evaluation_sets(configured: Callable[..., RunConfig]) -> None:
    for name, number in (("aime", 2), ("math", 300)):
        rows = [{"id": str(i), "prompt": f"{i} + 1?", "answer": i + 1} for i in range(number)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = configured("aime.jsonl")
    sets = load_held_out(config)
    assert [(s.name, len(s.prompts), s.samples, s.temperature) for s in sets] == [
        ("aime", 2, 32, 0.6),
        ("math", 200, 1, 0.0),
    ]
    engine = ScriptedEngine(lambda conversation: "1")

    async def main() -> tuple[dict[str, float], int]:
        async with engine.episodes(config) as episodes:
            threshold = config.evaluation.pass_threshold
            found = await evaluate_sets(episodes, sets, concurrency=16, pass_threshold=threshold, name="start")
            assert engine.temperatures == [0.6] * 64 + [0.0] * 200
            # What is played for training is sampled as ever.
            await episodes.run(sets[0].prompts[0], trajectory_id="t", group_id="t")
            assert engine.temperatures[-1] == config.rollout.temperature == 1.0
            return found

    metrics, count = asyncio.run(main())
    assert count == 264
    assert (metrics["aime/reward/mean"], metrics["aime/reward/pass"]) == (0.5, 0.5)
    assert metrics["math/reward/mean"] == metrics["math/reward/right"] == 1 / 200
