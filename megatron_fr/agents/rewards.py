"""Calls the user's reward function: in a process of its own, or in the event loop where it is an ``async def``."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
import traceback
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_fr.agents.contract import Prompt, RewardInput
from megatron_fr.agents.forkserver import ForkServer
from megatron_fr.agents.sandbox_results import CallResult
from megatron_fr.config import RewardConfig
from megatron_fr.errors import RewardError
from megatron_fr.runtime.importing import import_object, place_of, refusal, split_path

_FIELD = "reward.function"
_SCORE, _IS_ASYNC = f"{__name__}:score_in_child", f"{__name__}:is_async"


class FatalRewardError(RewardError):
    """The reward function failed too often in a row: the run must end."""


class RewardRunner:
    """Scores finished conversations with ``reward.function``; without one, with what the agent returned.

    A plain function is imported once, in a process that forks a child per call: what a call changes dies with it.
    An ``async def`` runs in this process's event loop: it may await servers, and must not block.

    Args:
        log_path: file to which a failed call's traceback is appended, and what a plain function printed.
    """

    def __init__(self, config: RewardConfig, log_path: Path | None = None) -> None:
        self._config = config
        self._log_path = log_path
        self._server = ForkServer(isolate=False)
        self._async_function: Any = None
        self._errors_in_a_row = 0

    async def start(self) -> None:
        """Import the function; ConfigError where it cannot be."""
        if (function := self._config.function) is None:
            return
        split_path(function, _FIELD)
        try:
            await self._server.start()
            for path in (_SCORE, function):
                if (reason := await self._server.preload(path)) is not None:
                    raise refusal(function, _FIELD, f"cannot be imported: {reason}")
            if (await self._server.call(_IS_ASYNC, {"function": function}, timeout_s=60)).value:
                await self._server.stop()
                self._async_function = import_object(function, _FIELD)
        except BaseException:
            await self._server.stop()
            raise

    async def score(self, episode: RewardInput) -> tuple[float, dict[str, float]]:
        """The reward, and the further named parts.

        Raises:
            RewardError: the function raised, took too long, or returned no finite number.
            FatalRewardError: that was the ``reward.max_consecutive_errors``-th time in a row.
        """
        config = self._config
        if config.function is None or self._async_function is not None:
            result = await self._score_here(episode)
        else:
            # Not asdict, which would copy every token id.
            sent = {field.name: getattr(episode, field.name) for field in fields(episode)}
            sent["prompt"] = vars(episode.prompt)
            arguments = {"function": config.function, "args": config.args, "episode": sent}
            result = await self._server.call(_SCORE, arguments, timeout_s=config.timeout_s)
        self._write_log(episode.prompt.id, result)
        if result.error is None:
            self._errors_in_a_row = 0
            parts = dict(result.value)
            return parts.pop("reward"), parts
        self._errors_in_a_row += 1
        source = f"reward.function={config.function!r}" if config.function else "the agent's reward"
        where = f"{source} on prompt {episode.prompt.id!r}"
        hint = f"; raise reward.timeout_s={config.timeout_s:g} or make it faster" if result.timed_out else ""
        if self._errors_in_a_row < config.max_consecutive_errors:
            raise RewardError(f"{where}: {result.error}{hint}")
        count = f"{self._errors_in_a_row} times in a row (reward.max_consecutive_errors)"
        raise FatalRewardError(f"{where} failed {count}: {result.error}{hint}")

    async def stop(self) -> None:
        await self._server.stop()

    async def _score_here(self, episode: RewardInput) -> CallResult:
        """Await an ``async def``, or take what the agent returned."""
        config, function = self._config, self._async_function
        try:
            async with asyncio.timeout(config.timeout_s) as limit:
                answer = episode.reward if function is None else await function(episode, **config.args)
        except Exception as error:  # the function is the user's code
            reason = f"{type(error).__name__}: {error} ({place_of(error)})"
            if limit.expired():
                reason = f"took longer than {config.timeout_s:g} s"
            return CallResult(None, reason, limit.expired(), traceback.format_exc())
        try:
            return CallResult(named_parts(answer, config.function or "the agent"), None, False, "")
        except (TypeError, ValueError) as error:
            return CallResult(None, f"{type(error).__name__}: {error}", False, "")

    def _write_log(self, prompt_id: str, result: CallResult) -> None:
        if self._log_path is None or not (result.output or result.error):
            return
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        head = f"{time.strftime('%H:%M:%S')} prompt {prompt_id!r}: {result.error or 'scored'}"
        with self._log_path.open("a", encoding="utf-8") as log:
            log.write(f"{head}\n{result.output.rstrip()}\n")


def is_async(function: str) -> bool:
    return inspect.iscoroutinefunction(import_object(function, _FIELD))


def score_in_child(function: str, args: Mapping[str, Any], episode: dict[str, Any]) -> dict[str, float]:
    """Call ``module:name`` on the :class:`RewardInput` rebuilt from JSON."""
    prompt = episode["prompt"] | {"messages": tuple(episode["prompt"]["messages"])}
    tuples = {name: tuple(episode[name]) for name in ("messages", "token_ids")}
    given = RewardInput(**{**episode, **tuples, "prompt": Prompt(**prompt)})
    return named_parts(import_object(function, _FIELD)(given, **args), function)


def named_parts(answer: Any, source: str) -> dict[str, float]:
    """What a reward function or an agent returned, as named parts that hold ``"reward"``.

    Raises:
        TypeError, ValueError: it is neither a finite float nor a mapping of them.
    """
    if answer is None:
        raise TypeError(f"{source} returned None; return a number, or named parts with 'reward'")
    parts = dict(answer) if isinstance(answer, Mapping) else {"reward": answer}
    if "reward" not in parts:
        raise ValueError(f"{source} returned the parts {sorted(parts)} without 'reward'")
    if taken := {"mean", "pass"} & parts.keys():
        raise ValueError(f"{source} returned the parts {sorted(taken)}, metrics of the reward itself; rename them")
    checked = {str(key): float(value) for key, value in parts.items()}
    for key, value in checked.items():
        if not math.isfinite(value):
            raise ValueError(f"{source} returned {key}={value}")
    return checked
