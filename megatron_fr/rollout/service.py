"""The rollout service: engines, agents, runner pool, queue and gate, started together and ended together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from aiohttp import web

from megatron_fr.agents.registry import make_agent
from megatron_fr.agents.rewards import RewardRunner
from megatron_fr.config import RunConfig
from megatron_fr.engines.fleet import Fleet
from megatron_fr.engines.probe import probe_engine
from megatron_fr.errors import MegatronFRError, RolloutEnded
from megatron_fr.rollout import setup
from megatron_fr.rollout.endpoints import Endpoints, Parts
from megatron_fr.rollout.episode import EpisodePlayer
from megatron_fr.rollout.evaluate import load_held_out
from megatron_fr.rollout.event_loop_delay import EventLoopDelay
from megatron_fr.rollout.prompts import PromptCursor, load_prompts
from megatron_fr.rollout.queue import TrajectoryQueue
from megatron_fr.rollout.runner import RunnerPool
from megatron_fr.rollout.staleness import StalenessGate
from megatron_fr.rollout.state import StatefulParts, describe_prompts, read_state
from megatron_fr.runtime.device import resolve_device

log = logging.getLogger(__name__)


class RolloutService:
    """Everything between prompts and batches.

    Make, start and stop it in one running event loop, in a thread that lives as long as the service: the kernel ends
    the engines with the thread that started them.

    Args:
        training: start training rollouts at once; off for evaluation alone.
        restore: state of an earlier run, from ``GET /state``; rollouts then wait for ``POST /start``, since the engines
            hold other weights until the trainer's first push.

    Attributes:
        failure: done with the reason once the run cannot go on; from then on ``/lease`` answers 410.
    """

    def __init__(self, config: RunConfig, *, training: bool = True, restore: Path | None = None) -> None:
        self._config = config
        self._training = training
        self._restore = restore
        self._background: list[asyncio.Task[Any]] = []
        self._exit = contextlib.AsyncExitStack()
        self._url: str | None = None
        self._parts: Parts | None = None
        self.failure: asyncio.Future[MegatronFRError] = asyncio.get_running_loop().create_future()

    @property
    def url(self) -> str:
        """Base address, known after :meth:`start`."""
        if self._url is None:
            raise RolloutEnded("the rollout service was not started")
        return self._url

    async def start(self) -> None:
        """Start everything; what fails early and cheaply comes first. Nothing is left running when it raises.

        Raises:
            MegatronFRError: the model, the data, the agent, the reward function or an engine is not usable.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the server, every trajectory, tool and engine, within about 3 s. Safe to call twice."""
        if not self.failure.done():
            self.failure.set_result(RolloutEnded("the rollout service was stopped"))
        await self._exit.aclose()

    async def _start(self) -> None:
        config, rollout = self._config, self._config.rollout
        device = resolve_device(config.device)
        limits = setup.model_limits(setup.load_hf_config(config.model.path), rollout.max_context)
        want_routes = setup.wants_routes(config, limits)
        tokenizer = setup.load_tokenizer(config.model.path)
        prompts = load_prompts(config.data.train, config.data.train_split)
        held_out = load_held_out(config)
        specs = setup.engine_specs(config, device, limits)
        restored = read_state(self._restore) if self._restore is not None else None

        rewards = RewardRunner(config.reward, Path(config.output) / "logs" / "reward.log")
        self._exit.push_async_callback(rewards.stop)
        await rewards.start()
        agent = make_agent(config.agent, tokenizer)
        self._exit.push_async_callback(agent.stop)
        await agent.start()
        fleet = Fleet(specs, limits, temperature=rollout.temperature, request_timeout_s=rollout.request_timeout_s)
        self._exit.push_async_callback(fleet.stop)
        await fleet.start()
        for client in fleet.clients:
            await probe_engine(client, limits, want_routes=want_routes)

        batch_size, group_size = config.train.batch_size, config.algorithm.group_size
        gate = StalenessGate(batch_size, config.max_policy_lag)

        def dropped(count: int) -> None:
            gate.drop(count)
            pool.wake()

        queue = TrajectoryQueue(
            batch_size=batch_size,
            group_size=group_size,
            max_policy_lag=config.max_policy_lag,
            limits=limits,
            on_drop=dropped,
        )
        player = EpisodePlayer(fleet, agent, rewards, limits, rollout, want_routes)
        cursor = PromptCursor(prompts, config.seed, config.data.shuffle)
        pool = RunnerPool(
            player,
            cursor,
            gate,
            queue,
            runners=rollout.max_concurrent_trajectories,
            group_size=group_size,
            on_fatal=self._fail,
        )
        self._exit.push_async_callback(pool.stop)
        source = describe_prompts(prompts, config.seed, config.data.shuffle)
        state = StatefulParts(cursor, prompts, source, gate, queue, pool)
        if restored is not None:
            state.restore(restored)
        self._parts = Parts(
            config=config,
            tokenizer=tokenizer,
            prompts=prompts,
            held_out=held_out,
            fleet=fleet,
            gate=gate,
            queue=queue,
            pool=pool,
            player=player,
            lag=EventLoopDelay(),
            failure=self.failure,
            state=state,
            training=self._training,
        )
        await self._serve(self._parts, restored.counters.version if restored is not None else 0)
        self._exit.push_async_callback(self._end_background)
        self._in_background(self._parts.lag.run())
        self._in_background(self._watch(fleet))
        if self._training and restored is None:
            pool.start()

    async def _serve(self, parts: Parts, version: int) -> None:
        host = self._config.rollout.host
        runner = web.AppRunner(Endpoints(parts, version).application(), shutdown_timeout=0.2, access_log=None)
        await runner.setup()
        self._exit.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, host, 0).start()
        self._url = f"http://{setup.advertised_host(host)}:{runner.addresses[0][1]}"

    async def _watch(self, fleet: Fleet) -> None:
        self._fail(await fleet.watch())

    def _fail(self, error: MegatronFRError) -> None:
        """The run cannot go on. An engine's death explains whatever else failed because of it."""
        if self.failure.done() or self._parts is None:
            return
        self.failure.set_result(self._parts.fleet.death() or error)
        log.error("the run cannot go on: %s", self.failure.result())
        self._in_background(self._parts.pool.stop())

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        self._background.append(asyncio.create_task(work))

    async def _end_background(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
