"""The rollout service without engines: real gate, queue, runner pool, cursor and HTTP interface; episodes are made up.

An episode depends on its prompt alone, so that two runs that use the same prompts train on the same trajectories.
"""

from __future__ import annotations

import asyncio
import random
import threading
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from megatron_fr.agents.contract import Prompt
from megatron_fr.config import RunConfig
from megatron_fr.rollout.endpoints import Endpoints
from megatron_fr.rollout.probe import ProbeSampler
from megatron_fr.rollout.runner import TrainingRollouts
from megatron_fr.rollout.state import RolloutState, restore_state, take_state
from megatron_fr.rollout.watchdog import EventLoopDelay
from megatron_fr.runtime.access import write_token
from megatron_fr.trajectory import ModelLimits, Trajectory

VOCAB = 512
LIMITS = ModelLimits(vocab_size=VOCAB, max_context=64)
PROMPTS = [Prompt(f"p{i:03d}", ({"role": "user", "content": str(i)},)) for i in range(100)]


@dataclass
class NoEngines:
    """A fleet of none."""

    urls: list[str] = field(default_factory=list)
    tokens_generated: int = 0
    version: int = 0

    def start_from(self, version: int) -> None:
        self.version = version

    set_version = start_from


@dataclass
class MadeUp:
    """Runs an episode in ``delay()`` seconds; with ``fails`` a first attempt raises."""

    fleet: NoEngines
    delay: Callable[[], float] = lambda: 0.0
    fails: Callable[[str], bool] = lambda _: False

    async def run(self, prompt: Prompt, *, trajectory_id: str, group_id: str, queued_s: float = 0.0) -> Trajectory:
        if (seconds := self.delay()) > 0:
            await asyncio.sleep(seconds)
        if self.fails(trajectory_id):
            raise ValueError("made to fail")
        return episode(prompt.id, trajectory_id, group_id, self.fleet.version)


def episode(prompt_id: str, trajectory_id: str, group_id: str, version: int) -> Trajectory:
    noise = np.random.default_rng(zlib.crc32(prompt_id.encode()))
    n = int(noise.integers(8, 24))
    mask = np.arange(n) >= 4
    return Trajectory(
        id=trajectory_id,
        prompt_id=prompt_id,
        group_id=group_id,
        tokens=noise.integers(0, VOCAB, n).astype(np.int32),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -np.log(VOCAB) + noise.normal(0, 0.01, n), 0).clip(max=0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        reward=float(noise.integers(0, 2)),
    )


class Rollouts:
    """The service's rollouts and endpoints; make it in a running event loop."""

    def __init__(
        self,
        config: RunConfig,
        restored: RolloutState | None = None,
        prompts: Sequence[Prompt] = PROMPTS,
        **episodes: Any,
    ) -> None:
        fleet: Any = NoEngines()
        made_up: Any = MadeUp(fleet, **episodes)
        failure: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.training = TrainingRollouts(config, prompts, made_up, LIMITS, on_fatal=failure.set_result)
        self.gate, self.queue, self.pool = self.training.gate, self.training.queue, self.training.pool
        if restored is not None:
            restore_state(self.training, restored)
        self.endpoints = Endpoints(
            fleet,
            self.training,
            ProbeSampler(None, PROMPTS, LIMITS, want_routes=False, template_kwargs={}),
            evaluate=None,
            event_loop_delay=EventLoopDelay(),
            failure=failure,
            version=restored.counters.version if restored is not None else 0,
        )

    def take_state(self, version: int) -> RolloutState:
        """What a checkpoint would hold now."""
        return take_state(self.training, version)


class Server:
    """:class:`Rollouts` over HTTP in a thread of their own.

    Args:
        on_request: called with method, path and the number of committed batches before each request is handled.
    """

    def __init__(
        self,
        config: RunConfig,
        restored: RolloutState | None = None,
        on_request: Callable[[str, str, int], None] = lambda *_: None,
    ) -> None:
        self._on_request = on_request
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self.url = ""
        #: ``(prompt, group)`` of the trajectories of each batch whose commit was asked for, by batches before it.
        self.used: dict[int, list[tuple[str, str]]] = {}
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(config, restored),))

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        self._loop.close()

    async def _serve(self, config: RunConfig, restored: RolloutState | None) -> None:
        rollouts = Rollouts(config, restored)
        app = rollouts.endpoints.application("token")
        write_token(config.output, "token")

        @web.middleware
        async def watch(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            if request.path == "/commit":
                leased = rollouts.queue.snapshot()[0][: config.train.batch_size]
                self.used[rollouts.gate.consumed_batches] = [(t.prompt_id, t.group_id) for t in leased]
            self._on_request(request.method, request.path, rollouts.gate.consumed_batches)
            return await handler(request)

        app.middlewares.insert(0, watch)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        if restored is None:
            rollouts.pool.start()
        self._ready.set()
        await self._stop.wait()
        await rollouts.pool.stop()
        await runner.cleanup()


def seeded_delay(seed: int) -> Callable[[], float]:
    """Up to 5 ms, so that episodes overtake each other."""
    generator = random.Random(seed)
    return lambda: generator.random() * 0.005
