"""``megatron-fr eval``: one evaluation with engines, agent and reward, without a trainer."""

from __future__ import annotations

import sys

import aiohttp

from megatron_fr.config import RunConfig
from megatron_fr.errors import ConfigError, EngineError
from megatron_fr.rollout.service import RolloutService
from megatron_fr.runtime.access import bearer
from megatron_fr.runtime.console import say_what_is_awaited


async def evaluate_model(config: RunConfig) -> dict[str, float]:
    """Evaluate ``config.model.path`` on every held-out set; the metrics have the names that training uses.

    Raises:
        MegatronFRError: there is nothing to evaluate on, or the engines did not start or died.
    """
    if not config.evaluation_sets:
        raise ConfigError("data.eval is not set; name a file or dataset of held-out prompts, or set evaluation.sets")
    service = RolloutService(config, training=False)
    engines, logs = config.rollout.engines, config.output / "logs"
    try:
        with say_what_is_awaited(lambda: f"{engines} engine(s); logs in {logs}", stream=sys.stderr):
            await service.start()
        with say_what_is_awaited(lambda: "the evaluation", stream=sys.stderr):
            return await _evaluate(service.url, service.token)
    finally:
        await service.stop()


async def _evaluate(url: str, token: str) -> dict[str, float]:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), headers=bearer(token)) as http,
        http.post(f"{url}/evaluate", json={"name": "eval"}) as response,
    ):
        body = await response.json()
        if response.status != 200:
            raise EngineError(body.get("error", f"evaluation failed with HTTP {response.status}"))
        return {f"eval/{name}": value for name, value in body["metrics"].items()}
