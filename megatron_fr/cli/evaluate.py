"""``megatron-fr eval``: engines, agent and reward without a trainer, one evaluation, one line of JSON."""

from __future__ import annotations

import asyncio
import json

import aiohttp

from megatron_fr.config import RunConfig
from megatron_fr.errors import ConfigError, EngineError
from megatron_fr.rollout.service import RolloutService


def evaluate_model(config: RunConfig) -> int:
    """Evaluate ``config.model.path`` on every held-out set and print the metrics, by the names that training uses.

    Raises:
        MegatronFRError: nothing to evaluate on, or the engines did not start or died.
    """
    if not config.evaluation_sets:
        raise ConfigError("data.eval is not set; name a file or dataset of held-out prompts, or set evaluation.sets")
    print(json.dumps(asyncio.run(_evaluate(config))))
    return 0


async def _evaluate(config: RunConfig) -> dict[str, float]:
    service = RolloutService(config, training=False)
    try:
        await service.start()
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http,
            http.post(f"{service.url}/evaluate", json={"name": "eval"}) as response,
        ):
            body = await response.json()
            if response.status != 200:
                raise EngineError(body.get("error", f"evaluation failed with HTTP {response.status}"))
            return {f"eval/{name}": value for name, value in body["metrics"].items()}
    finally:
        await service.stop()
