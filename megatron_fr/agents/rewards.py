"""Calls the user's reward function: in a process of its own, or in the event loop where it is an ``async def``."""

from __future__ import annotations

import asyncio
import time
import traceback
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_fr.agents.contract import RewardInput
from megatron_fr.agents.forkserver import ForkServer
from megatron_fr.agents.reward_call import FIELD, named_parts
from megatron_fr.agents.sandbox_results import CallResult
from megatron_fr.config import RewardConfig
from megatron_fr.errors import RewardError
from megatron_fr.runtime.importing import import_object, place_of, refusal, split_path


class FatalRewardError(RewardError):
    """The reward function failed too often in a row: the run must end."""

    fatal = True


class RewardRunner:
    """Scores finished conversations with ``reward.function``; without one, with what the agent returned.

    A plain function is imported once, in a process that forks a child per call, and sees the environment and
    ``sys.path`` of this process. It must not rely on state that it changes: each call's changes die with its child.
    An ``async def`` runs in this process's event loop: it may await servers, and must not block.

    Args:
        log_path: file to which what a call printed, and the traceback of one that failed, are appended. Of an
            ``async def`` it gets the traceback; its prints go to this process's standard output.
    """

    def __init__(self, config: RewardConfig, log_path: Path | None = None) -> None:
        self._config = config
        self._log_path = log_path
        self._server = ForkServer(isolate=False)
        self._async_function: Any = None
        self._errors_in_a_row = 0

    async def start(self) -> None:
        """Import the function.

        Raises:
            ConfigError: it cannot be imported or is not callable.
        """
        if (function := self._config.function) is None:
            return
        split_path(function, FIELD)
        try:
            await self._server.start()
            for path in ("megatron_fr.agents.reward_call:score", function):
                if (problem := await self._server.preload(path)) is not None:
                    raise refusal(function, FIELD, f"cannot be imported: {problem}")
            found = await self._server.call(
                "megatron_fr.agents.reward_call:is_async", {"function": function}, timeout_s=60
            )
            if found.value:
                await self._server.stop()
                self._async_function = import_object(function, FIELD)
        except BaseException:
            await self._server.stop()
            raise

    async def score(self, episode: RewardInput) -> tuple[float, dict[str, float]]:
        """The reward, and the named parts (without the reward itself).

        Raises:
            RewardError: the function raised, took too long, or returned no finite number. The message ends with the
                traceback's last line.
            FatalRewardError: that was the ``reward.max_consecutive_errors``-th time in a row.
        """
        config = self._config
        if config.function is None:
            result = _checked(episode.reward, "the agent")
        elif self._async_function is not None:
            result = await self._await(episode)
        else:
            # Not asdict, which would copy every token id.
            sent = {field.name: getattr(episode, field.name) for field in fields(episode)}
            sent["prompt"] = vars(episode.prompt)
            arguments = {"function": config.function, "args": config.args, "episode": sent}
            result = await self._server.call(
                "megatron_fr.agents.reward_call:score", arguments, timeout_s=config.timeout_s
            )
        self._write_log(episode.prompt.id, result)
        if result.error is None:
            self._errors_in_a_row = 0
            parts = dict(result.value)
            return parts.pop("reward"), parts
        self._errors_in_a_row += 1
        source = f"reward.function={config.function!r}" if config.function else "the agent's reward"
        where = f"{source} on prompt {episode.prompt.id!r}"
        hint = f"; raise reward.timeout_s={config.timeout_s:g} or make it faster" if result.timed_out else ""
        if self._errors_in_a_row >= config.max_consecutive_errors:
            raise FatalRewardError(
                f"{where} failed {self._errors_in_a_row} times in a row (reward.max_consecutive_errors): "
                f"{result.error}{hint}"
            )
        raise RewardError(f"{where}: {result.error}{hint}")

    async def stop(self) -> None:
        """End the process and every running call."""
        await self._server.stop()

    async def _await(self, episode: RewardInput) -> CallResult:
        config = self._config
        try:
            async with asyncio.timeout(config.timeout_s) as limit:
                return _checked(await self._async_function(episode, **config.args), str(config.function))
        except Exception as error:  # the function is the user's code
            if limit.expired():
                return CallResult(None, f"took longer than {config.timeout_s:g} s", True, traceback.format_exc())
            reason = f"{type(error).__name__}: {error} ({place_of(error)})"
            return CallResult(None, reason, False, traceback.format_exc())

    def _write_log(self, prompt_id: str, result: CallResult) -> None:
        if self._log_path is None or not (result.output or result.error):
            return
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        head = f"{time.strftime('%H:%M:%S')} prompt {prompt_id!r}: {result.error or 'scored'}"
        with self._log_path.open("a", encoding="utf-8") as log:
            log.write(f"{head}\n{result.output.rstrip()}\n")


def _checked(answer: Any, source: str) -> CallResult:
    """A result of what was returned in this process."""
    try:
        return CallResult(named_parts(answer, source), None, False, "")
    except (TypeError, ValueError) as error:
        return CallResult(None, f"{type(error).__name__}: {error}", False, "")
