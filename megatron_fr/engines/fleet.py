"""All engines of a run: started together, lent to trajectories by load, watched until the end."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import aiohttp

from megatron_fr.engines.client import EngineClient
from megatron_fr.engines.engine import Engine, EngineSpec
from megatron_fr.errors import EngineError
from megatron_fr.runtime.access import bearer
from megatron_fr.trajectory import ModelLimits

# Starts are spread out: simultaneous ones peak in memory together.
_STAGGER_S = 1.0
_WATCH_S = 0.25
_SAY_S = 10.0

log = logging.getLogger(__name__)


class Fleet:
    """Starts and owns the engines; see :class:`EngineClient` for the arguments."""

    def __init__(
        self, specs: Sequence[EngineSpec], limits: ModelLimits, *, temperature: float, request_timeout_s: float
    ) -> None:
        self._engines = [Engine(spec) for spec in specs]
        self._options: Any = {"limits": limits, "temperature": temperature, "timeout_s": request_timeout_s}
        self._http: aiohttp.ClientSession | None = None
        self._load: Counter[str] = Counter()
        self.clients: list[EngineClient] = []

    @property
    def urls(self) -> list[str]:
        """The engines' base addresses."""
        return [client.url for client in self.clients]

    @property
    def tokens_generated(self) -> int:
        """Tokens sampled by all engines since the start."""
        return sum(client.tokens_generated for client in self.clients)

    async def start(self) -> None:
        """Start every engine; where one raises (see :meth:`Engine.start`), none is left running."""
        saying = asyncio.create_task(self._say_what_is_awaited())
        try:
            async with asyncio.TaskGroup() as group:
                for index, engine in enumerate(self._engines):
                    group.create_task(engine.start(after_s=index * _STAGGER_S))
        except* Exception as errors:
            await self.stop()
            raise errors.exceptions[0] from None
        finally:
            saying.cancel()
        headers = bearer(self._engines[0].spec.token)
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers)
        self.clients = [EngineClient(engine.url, self._http, **self._options) for engine in self._engines]

    async def _say_what_is_awaited(self) -> None:
        while True:
            await asyncio.sleep(_SAY_S)
            for engine in (engine for engine in self._engines if not engine.ready):
                log.info("engine %d of %d starts: %s", engine.spec.index, len(self._engines), engine.last_line())

    @contextmanager
    def borrow(self) -> Iterator[EngineClient]:
        """Lend the engine with the fewest trajectories to one more."""
        client = min(self.clients, key=lambda c: self._load[c.url])
        self._load[client.url] += 1
        try:
            yield client
        finally:
            self._load[client.url] -= 1

    def client(self, url: str) -> EngineClient:
        """The client of one engine, or EngineError where none has this address."""
        if (found := {client.url: client for client in self.clients}.get(url)) is None:
            raise EngineError(f"there is no engine {url!r}; the engines are {', '.join(self.urls)}")
        return found

    def start_from(self, version: int) -> None:
        """Note that engines hold the trainer's first weights, perhaps others than those they had as ``version``."""
        for client in self.clients:
            client.forget_prefixes()
        self.set_version(version)

    def set_version(self, version: int) -> None:
        """Note that the trainer has brought every engine to ``version``."""
        for client in self.clients:
            client.version = max(client.version, version)

    def death(self) -> EngineError | None:
        """Why the fleet is incomplete, or None while every engine lives."""
        for engine in self._engines:
            if (reason := engine.death()) is not None:
                return EngineError(f"engine {engine.spec.index} ({engine.url}) died: {reason}")
        return None

    async def watch(self) -> EngineError:
        """Wait until an engine dies; returns why."""
        while (error := self.death()) is None:
            await asyncio.sleep(_WATCH_S)
        return error

    async def stop(self, *, grace_s: float = 1.0) -> None:
        """End every engine, all at once; nothing is left running."""
        if self._http is not None:
            await self._http.close()
        await asyncio.gather(*(engine.stop(grace_s=grace_s) for engine in self._engines))
