"""Calls the user's reward function: in worker processes, or in the event loop where it is an ``async def``."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import signal
import tempfile
import time
import traceback
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool

from megatron_fr.agents.contract import RewardInput
from megatron_fr.agents.reward_worker import FIELD, Scored, call, checked, failure, is_async, prepare
from megatron_fr.config import RewardConfig
from megatron_fr.errors import ConfigError, RewardError
from megatron_fr.runtime.importing import import_object, refusal, split_path

_IMPORT_TIMEOUT_S = 60.0
_LOGGED_CHARS = 4096


class RewardRunner:
    """Scores finished conversations with ``reward.function``; without one, with what the agent returned.

    A plain function runs in ``reward.workers`` processes, which import it once and end with this process; one that
    crashes or takes too long is replaced. An ``async def`` runs in this process's event loop: it may await servers,
    and must not block.

    Args:
        log_path: file to which a failed call's traceback is appended, and what a plain function printed.
    """

    def __init__(self, config: RewardConfig, log_path: Path | None = None) -> None:
        self._config = config
        self._log_path = log_path
        self._pool: ProcessPool | None = None
        self._async_function: Any = None

    async def start(self) -> None:
        """Import the function; ConfigError where it cannot be."""
        if (function := self._config.function) is None:
            return
        split_path(function, FIELD)
        try:
            async with asyncio.timeout(_IMPORT_TIMEOUT_S):
                awaited = await asyncio.wrap_future(self._workers(function).schedule(is_async, (function,)))
        except ConfigError:
            await self.stop()
            raise
        except Exception as error:
            await self.stop()
            reason = "takes over 60 s" if isinstance(error, TimeoutError) else f"ends its process: {error}"
            raise refusal(function, FIELD, f"cannot be imported: that {reason}") from error
        if awaited:
            await self.stop()
            self._async_function = import_object(function, FIELD)

    async def score(self, episode: RewardInput) -> tuple[float, dict[str, float]]:
        """The reward, and the further named parts.

        Raises:
            RewardError: the function raised, took too long, or returned no finite number.
        """
        config = self._config
        if config.function is None or self._async_function is not None:
            result = await self._score_here(episode)
        else:
            result = await self._score_in_worker(episode, config.function)
        self._write_log(episode.prompt.id, result)
        if result.error is None:
            parts = dict(result.parts)
            return parts.pop("reward"), parts
        source = f"reward.function={config.function!r}" if config.function else "the agent's reward"
        hint = f"; raise reward.timeout_s={config.timeout_s:g} or make it faster" if result.timed_out else ""
        raise RewardError(f"{source} on prompt {episode.prompt.id!r}: {result.error}{hint}")

    async def stop(self) -> None:
        """End the workers."""
        if (pool := self._pool) is not None:
            self._pool = None
            pool.stop()  # type: ignore[no-untyped-call]
            await asyncio.to_thread(pool.join)

    def _workers(self, function: str) -> ProcessPool:
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")  # this process has threads, which a fork would not survive
            self._pool = ProcessPool(self._config.workers, 0, prepare, (function,), spawn)
        return self._pool

    async def _score_in_worker(self, episode: RewardInput, function: str) -> Scored:
        limit = self._config.timeout_s
        if self._pool is not None and not self._pool.active:  # it breaks when a worker dies that had nothing to do
            await self.stop()
        with tempfile.NamedTemporaryFile(prefix="megatron-fr-reward-") as printed:
            try:
                # Pickled here: what cannot be is this call's failure, and in the pool's own thread would stop the pool.
                sent = pickle.dumps((episode, self._config.args))
                future = self._workers(function).schedule(call, (function, sent, printed.name), timeout=limit)
                result = await asyncio.wrap_future(future)
            except TimeoutError:
                result = Scored({}, f"took longer than {limit:g} s", timed_out=True)
            except ProcessExpired as error:
                result = Scored({}, f"its process ended without an answer ({_death(error.exitcode)})")
            except BrokenProcessPool as error:
                result = Scored({}, f"its process ended without an answer ({error})")
            except Exception as error:  # of pickling: whatever an object in the metadata or info raises
                result = Scored({}, f"its input cannot be sent to a worker: {type(error).__name__}: {error}")
            output = printed.read(_LOGGED_CHARS).decode(errors="replace")
        return replace(result, output=output + result.output)

    async def _score_here(self, episode: RewardInput) -> Scored:
        """Await an ``async def``, or take what the agent returned."""
        config, function = self._config, self._async_function
        if function is None:
            return checked(episode.reward, "the agent")
        try:
            async with asyncio.timeout(config.timeout_s) as limit:
                answer = await function(episode, **config.args)
        except Exception as error:  # the function is the user's code
            if limit.expired():
                return Scored({}, f"took longer than {config.timeout_s:g} s", traceback.format_exc(), timed_out=True)
            return failure(error)
        return checked(answer, str(config.function))

    def _write_log(self, prompt_id: str, result: Scored) -> None:
        if self._log_path is None or not (result.output or result.error):
            return
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        head = f"{time.strftime('%H:%M:%S')} prompt {prompt_id!r}: {result.error or 'scored'}"
        with self._log_path.open("a", encoding="utf-8") as log:
            log.write(f"{head}\n{result.output.rstrip()}\n")


def _death(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    return f"ended by {signal.Signals(-status).name}"
