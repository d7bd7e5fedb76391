"""The rollout service: engines, agents, runner pool, queue and gate, started together and ended together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from megatron_fr.agents.registry import make_agent
from megatron_fr.agents.rewards import RewardRunner
from megatron_fr.config import RunConfig
from megatron_fr.engines.fleet import Fleet
from megatron_fr.engines.probe import probe_engine
from megatron_fr.errors import MegatronFRError, RolloutEnded
from megatron_fr.hf.folder import read_spec
from megatron_fr.rollout import setup
from megatron_fr.rollout.endpoints import Endpoints
from megatron_fr.rollout.episode import EpisodeRunner
from megatron_fr.rollout.evaluate import HeldOut, evaluate_sets, load_held_out
from megatron_fr.rollout.event_loop_delay import EventLoopDelay
from megatron_fr.rollout.probe import ProbeSampler
from megatron_fr.rollout.prompts import load_prompts
from megatron_fr.rollout.state import read_state, restore_state
from megatron_fr.rollout.training import TrainingRollouts
from megatron_fr.runtime.device import resolve_device

log = logging.getLogger(__name__)


class _Startable(Protocol):
    async def start(self) -> None: ...

    async def stop(self) -> None: ...


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
        self._fleet: Fleet | None = None
        self._rollouts: TrainingRollouts | None = None
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
        limits = setup.model_limits(read_spec(config.model.path), rollout.max_context)
        want_routes = setup.wants_routes(config, limits)
        tokenizer = setup.load_tokenizer(config.model.path)
        prompts = load_prompts(config.data.train, config.data.train_split)
        held_out = load_held_out(config)
        specs = setup.engine_specs(config, device, limits)
        restored = read_state(self._restore) if self._restore is not None else None

        rewards = await self._started(RewardRunner(config.reward, Path(config.output) / "logs" / "reward.log"))
        agent = await self._started(make_agent(config.agent, tokenizer))
        fleet = await self._started(
            Fleet(specs, limits, temperature=rollout.temperature, request_timeout_s=rollout.request_timeout_s)
        )
        for client in fleet.clients:
            await probe_engine(client, limits, want_routes=want_routes)

        episodes = EpisodeRunner(fleet, agent, rewards, limits, rollout, want_routes)
        rollouts = TrainingRollouts(config, prompts, episodes, limits, on_fatal=self._fail)
        self._exit.push_async_callback(rollouts.pool.stop)
        if restored is not None:
            restore_state(rollouts, restored)
        self._fleet, self._rollouts = fleet, rollouts
        delay = EventLoopDelay()
        endpoints = Endpoints(
            fleet,
            rollouts,
            ProbeSampler(
                tokenizer,
                prompts,
                limits,
                want_routes=want_routes,
                template_kwargs=config.agent.chat_template_kwargs,
            ),
            evaluate=self._evaluation(episodes, held_out),
            event_loop_delay=delay,
            failure=self.failure,
            training=self._training,
            version=restored.counters.version if restored is not None else 0,
        )
        await self._serve(endpoints)
        self._exit.push_async_callback(self._end_background)
        self._in_background(delay.run())
        self._in_background(self._watch(fleet))
        if self._training and restored is None:
            rollouts.pool.start()

    async def _started[T: _Startable](self, part: T) -> T:
        self._exit.push_async_callback(part.stop)
        await part.start()
        return part

    def _evaluation(
        self, episodes: EpisodeRunner, held_out: Sequence[HeldOut]
    ) -> Callable[..., Awaitable[tuple[dict[str, float], int]]] | None:
        if not held_out:
            return None
        return partial(
            evaluate_sets,
            episodes,
            held_out,
            pass_threshold=self._config.evaluation.pass_threshold,
            concurrency=self._config.rollout.max_concurrent_trajectories,
        )

    async def _serve(self, endpoints: Endpoints) -> None:
        host = self._config.rollout.host
        runner = web.AppRunner(endpoints.application(), shutdown_timeout=0.2, access_log=None)
        await runner.setup()
        self._exit.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, host, 0).start()
        self._url = f"http://{setup.advertised_host(host)}:{runner.addresses[0][1]}"

    async def _watch(self, fleet: Fleet) -> None:
        self._fail(await fleet.watch())

    def _fail(self, error: MegatronFRError) -> None:
        """The run cannot go on. An engine's death explains whatever else failed because of it."""
        if self.failure.done() or self._fleet is None or self._rollouts is None:
            return
        self.failure.set_result(self._fleet.death() or error)
        log.error("the run cannot go on: %s", self.failure.result())
        self._in_background(self._rollouts.pool.stop())

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        self._background.append(asyncio.create_task(work))

    async def _end_background(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
