"""What a tiny policy does on its task: sampling with transformers alone, many conversations at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fr.agents import arithmetic
from megatron_fr.agents.contract import Agent, Generation, Outcome, Prompt, RewardInput
from megatron_fr.agents.python_tool import PythonToolAgent
from megatron_fr.config import AgentConfig
from megatron_fr.rollout.prompts import load_prompts

MAX_NEW_TOKENS = 96


@dataclass
class _Request:
    tokens: list[int]
    stops: tuple[int, ...]
    limit: int
    answer: asyncio.Future[list[int]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class LocalSampler:
    """Samples at temperature 1 from a transformers model; requests that wait at the same time share a batch."""

    def __init__(self, model: Any, pad_token_id: int, *, seed: int = 0, batch: int = 64) -> None:
        import torch

        self._model = model
        self._pad = pad_token_id
        self._batch = batch
        self._waiting: asyncio.Queue[_Request] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        torch.manual_seed(seed)

    async def __aenter__(self) -> LocalSampler:
        self._task = asyncio.create_task(self._work())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def sample(self, tokens: Sequence[int], stops: Sequence[int], limit: int) -> list[int]:
        """At most ``limit`` new tokens; a sampled stop token is the last of them."""
        request = _Request(list(tokens), tuple(stops), limit)
        await self._waiting.put(request)
        return await request.answer

    async def _work(self) -> None:
        while True:
            requests = [await self._waiting.get()]
            await asyncio.sleep(0.02)  # let the conversations that a batch just released come back
            while len(requests) < self._batch and not self._waiting.empty():
                requests.append(self._waiting.get_nowait())
            try:
                answers = await asyncio.to_thread(self._generate, requests)
            except Exception as error:
                for request in requests:
                    request.answer.set_exception(error)
                continue
            for request, answer in zip(requests, answers, strict=True):
                if not request.answer.done():
                    request.answer.set_result(answer)

    def _generate(self, requests: list[_Request]) -> list[list[int]]:
        import torch

        width = max(len(request.tokens) for request in requests)
        tokens = torch.full((len(requests), width), self._pad)
        mask = torch.zeros_like(tokens)
        for row, request in enumerate(requests):
            tokens[row, width - len(request.tokens) :] = torch.tensor(request.tokens)
            mask[row, width - len(request.tokens) :] = 1
        stops = sorted({stop for request in requests for stop in request.stops})
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=tokens,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max(request.limit for request in requests),
                eos_token_id=stops,
                pad_token_id=self._pad,
            )
        return [_until_stop(row[width:].tolist(), request) for row, request in zip(output, requests, strict=True)]


def _until_stop(sampled: list[int], request: _Request) -> list[int]:
    for i, token in enumerate(sampled[: request.limit]):
        if token in request.stops:
            return sampled[: i + 1]
    return sampled[: request.limit]


class LocalSession:
    """A :class:`~megatron_fr.agents.contract.TokenSession` over a :class:`LocalSampler`."""

    def __init__(self, sampler: LocalSampler, max_new_tokens: int) -> None:
        self._sampler = sampler
        self._left = max_new_tokens
        self._tokens: list[int] = []

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    @property
    def action_tokens_left(self) -> int:
        return self._left

    def observe(self, token_ids: Sequence[int]) -> None:
        self._tokens += token_ids

    async def generate(self, *, stop_token_ids: Sequence[int], max_tokens: int | None = None) -> Generation:
        limit = self._left if max_tokens is None else min(self._left, max_tokens)
        if limit <= 0:
            return Generation((), "length")
        sampled = await self._sampler.sample(self._tokens, stop_token_ids, limit)
        self._tokens += sampled
        self._left -= len(sampled)
        return Generation(tuple(sampled), "stop" if sampled[-1] in stop_token_ids else "length")


async def sample_all(
    agent: Agent, sampler: LocalSampler, prompts: Sequence[Prompt], max_new_tokens: int
) -> list[tuple[Outcome, int]]:
    """One rollout of each prompt, all at once; with each outcome the length of its token sequence."""

    async def one(prompt: Prompt) -> tuple[Outcome, int]:
        session = LocalSession(sampler, max_new_tokens)
        return await agent.rollout(prompt, session), len(session.tokens)

    return await asyncio.gather(*(one(prompt) for prompt in prompts))


def evaluate_policy(
    model: Any, tokenizer: Any, prompts_file: Path, num_prompts: int, *, seed: int = 0
) -> dict[str, float]:
    """Sample one conversation of each of the first prompts at temperature 1, with the real tool and reward.

    Returns:
        ``reward``, ``tool_calls``, ``tool_errors``, mean and largest token count, and under ``share_*`` how the
        conversations went: solved, guessed without the tool, stopped early, broken code, other.
    """
    return asyncio.run(_evaluate(model, tokenizer, prompts_file, num_prompts, seed))


async def _evaluate(model: Any, tokenizer: Any, prompts_file: Path, num_prompts: int, seed: int) -> dict[str, float]:
    prompts = load_prompts(prompts_file)[:num_prompts]
    agent = PythonToolAgent(tokenizer, AgentConfig(max_turns=4))
    await agent.start()
    try:
        async with LocalSampler(model, tokenizer.pad_token_id, seed=seed) as sampler:
            results = await sample_all(agent, sampler, prompts, MAX_NEW_TOKENS)
    finally:
        await agent.stop()
    ways: Counter[str] = Counter()
    rewards = []
    for prompt, (outcome, _) in zip(prompts, results, strict=True):
        last = outcome.messages[-1]
        final = str(last["content"]) if last["role"] == "assistant" else ""
        counts = outcome.num_tool_calls, outcome.num_tool_errors
        episode = RewardInput(prompt, outcome.messages, final, outcome.finish_reason, *counts)
        parts = arithmetic.exact_answer(episode)
        rewards.append(parts["reward"])
        ways[_way(parts, *counts)] += 1
    total = len(prompts)
    lengths = [length for _, length in results]
    return {
        "reward": sum(rewards) / total,
        "tool_calls": sum(outcome.num_tool_calls for outcome, _ in results) / total,
        "tool_errors": sum(outcome.num_tool_errors for outcome, _ in results) / total,
        "tokens_mean": sum(lengths) / total,
        "tokens_max": max(lengths),
        **{f"share_{way}": ways[way] / total for way in ("solved", "guessed", "stopped_early", "broken_code", "other")},
    }


def _way(parts: dict[str, float], calls: int, errors: int) -> str:
    if parts["reward"]:
        return "solved"
    if not calls and parts["answered"]:
        return "guessed"
    if parts["stopped_early"]:
        return "stopped_early"
    return "broken_code" if errors else "other"
