"""The rollout service: engines, agents, runner pool, queue and gate, started together and ended together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import secrets
import socket
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from megatron_fr.agents.registry import make_agent
from megatron_fr.agents.rewards import RewardRunner
from megatron_fr.checkpoint.fixed import check_unchanged, model_settings, run_settings
from megatron_fr.checkpoint.store import RUN_FILE
from megatron_fr.config import RunConfig
from megatron_fr.engines.engine import EngineSpec
from megatron_fr.engines.fleet import Fleet
from megatron_fr.engines.probe import probe_engine
from megatron_fr.errors import ConfigError, MegatronFRError, ModelError, RolloutEnded
from megatron_fr.hf.folder import has_tokenizer, read_spec, resolve_folder
from megatron_fr.models.layouts import check_aux_loss, check_layout
from megatron_fr.models.spec import ModelSpec
from megatron_fr.rollout.cursor import PromptCursor
from megatron_fr.rollout.endpoints import Endpoints
from megatron_fr.rollout.evaluate import evaluate_sets, load_held_out
from megatron_fr.rollout.probe import ProbeSampler
from megatron_fr.rollout.prompts import load_prompts
from megatron_fr.rollout.runner import TrainingRollouts
from megatron_fr.rollout.session import EpisodeRunner
from megatron_fr.rollout.state import check_same_prompts, read_state, restore_state
from megatron_fr.rollout.watchdog import EventLoopDelay, report_stuck
from megatron_fr.runtime.device import Device, resolve_device
from megatron_fr.trajectory import ModelLimits

log = logging.getLogger(__name__)

#: Of an engine, above its share: for the probe after a sync, and for requests given up here that still run there.
_SPARE_SLOTS = 4


class RolloutService:
    """Everything between prompts and batches.

    Make, start and stop it in one running event loop, in a thread that lives as long as the service: the kernel ends
    the engines with the thread that started them. :meth:`start` sets ``url``. Once the run cannot go on, ``failure``
    holds the reason, and ``/lease`` answers 410.

    Args:
        training: start training rollouts at once; off for evaluation alone.
        restore: state of an earlier run, from ``GET /state``; rollouts then wait for ``POST /start``, since the engines
            hold other weights until the trainer's first push.
    """

    _fleet: Fleet
    _rollouts: TrainingRollouts
    _ending: asyncio.Task[None]

    def __init__(self, config: RunConfig, *, training: bool = True, restore: Path | None = None) -> None:
        self._config, self._training, self._restore = config, training, restore
        self._exit = contextlib.AsyncExitStack()
        self.url = ""
        self.token = secrets.token_hex(32)  #: that requests to this service and its engines must show
        self.failure: asyncio.Future[MegatronFRError] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Start everything, what fails cheaply first; nothing is left running when it raises.

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
        # A trajectory has a connection here and one in its engine, which inherits the limit; the usual one is 1,024.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        device = resolve_device(config.device)
        spec = read_spec(config.model.path)
        limits = model_limits(spec, rollout.max_context)
        if self._training:  # the trainer would find these too, when the engines have started
            check_aux_loss(spec, config.train.moe_aux_loss_coeff)
            check_layout(spec, config.parallel)
        want_routes = config.train.routing_replay == "rollout" and limits.num_moe_layers > 0
        tokenizer = load_tokenizer(config.model.path, limits.vocab_size)
        prompts = load_prompts(config.data.train, config.data.train_split)
        held_out = load_held_out(config)
        specs = engine_specs(config, device, want_routes, self.token)
        probe = ProbeSampler(tokenizer, prompts, limits, want_routes, config.agent.chat_template_kwargs)
        probe.tokens(prompts[0])
        restored = None
        if self._restore is not None:
            restored = read_state(self._restore)
            check_same_prompts(restored, PromptCursor(prompts, config.seed, config.data.shuffle))
            if (folder := self._restore.parent).joinpath(RUN_FILE).exists():
                source = resolve_folder(config.model.path, weights=False)
                check_unchanged(folder, run_settings(config) | model_settings(spec.identity(), source))

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

        episodes = EpisodeRunner(fleet, agent, rewards, limits, rollout, want_routes, config.agent.timeout_s)
        rollouts = TrainingRollouts(config, prompts, episodes, limits, on_fatal=self._fail)
        self._exit.push_async_callback(rollouts.pool.stop)
        if restored is not None:
            restore_state(rollouts, restored)
        else:
            rollouts.failed.restore({})
        self._fleet, self._rollouts = fleet, rollouts
        delay = EventLoopDelay()
        evaluate = partial(
            evaluate_sets,
            episodes,
            held_out,
            pass_threshold=config.evaluation.pass_threshold,
            concurrency=rollout.max_concurrent_trajectories,
        )
        endpoints = Endpoints(
            fleet,
            rollouts,
            probe,
            evaluate=evaluate if held_out else None,
            event_loop_delay=delay,
            failure=self.failure,
            agent_metrics=agent.metrics,
            training=self._training,
            version=restored.counters.version if restored is not None else 0,
        )
        server = endpoints.runner(self.token)
        await server.setup()
        self._exit.push_async_callback(server.cleanup)
        await web.TCPSite(server, rollout.host, 0).start()
        any_address = rollout.host in ("0.0.0.0", "::", "")
        self.url = f"http://{socket.gethostname() if any_address else rollout.host}:{server.addresses[0][1]}"
        stuck = report_stuck(lambda: rollouts.pool.finished + rollouts.gate.failed, rollouts.pool.waiting_for)
        for work in (delay.run(), self._watch(), stuck):
            self._exit.push_async_callback(_cancel, asyncio.create_task(work))
        if self._training and restored is None:
            rollouts.pool.start()

    async def _watch(self) -> None:
        self._fail(await self._fleet.watch())

    def _fail(self, error: MegatronFRError) -> None:
        """The run cannot go on. An engine's death explains whatever else failed because of it."""
        if not self.failure.done():
            self.failure.set_result(self._fleet.death() or error)
            log.error("the run cannot go on: %s", self.failure.result())
            self._ending = asyncio.create_task(self._rollouts.pool.stop())


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def load_tokenizer(path: str, vocab_size: int) -> Any:
    """The policy's tokenizer; ModelError where there is none, or it has ids of ``vocab_size`` or above."""
    from transformers import AutoTokenizer

    folder = resolve_folder(path, weights=False)
    if not has_tokenizer(folder):
        raise ModelError(f"model.path={path!r} has no usable tokenizer: no tokenizer.json; fetch the folder again")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # unsaid, it asks on a terminal
    except Exception as error:  # damaged files raise a dozen kinds
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ModelError(f"model.path={path!r} has no usable tokenizer: {reason}; fetch it again") from error
    if (largest := max(tokenizer.get_vocab().values(), default=0)) >= vocab_size:
        raise ModelError(
            f"model.path={path!r}: its tokenizer has token {largest}, its model a vocabulary of {vocab_size}; "
            "take both from one model, or enlarge the model's embedding"
        )
    return tokenizer


def model_limits(spec: ModelSpec, max_context: int) -> ModelLimits:
    """What trajectories of this model may contain; ModelError where the engine cannot serve it."""
    if spec.unserved is not None:
        raise ModelError(f"model.path is a model to convert but not to sample from: {spec.unserved}")
    return ModelLimits(
        vocab_size=spec.vocab,
        max_context=max_context,
        num_moe_layers=len(spec.moe_layers),
        top_k=spec.top_k,
        num_experts=spec.experts,
        dense_layers=tuple(n for n in range(spec.layers) if n not in spec.moe_layers) if spec.moe else (),
    )


def engine_specs(config: RunConfig, device: Device, want_routes: bool, token: str | None = None) -> list[EngineSpec]:
    """One specification an engine; ConfigError where there are fewer GPUs than they need."""
    rollout = config.rollout
    if device.kind == "cuda":
        import torch

        needed, visible = rollout.engines * rollout.engine_tp, torch.cuda.device_count()
        if needed > visible:
            raise ConfigError(
                f"rollout.engines={rollout.engines} x rollout.engine_tp={rollout.engine_tp} need {needed} "
                f"GPUs, {visible} are visible; start fewer engines, or show the rollout service more GPUs"
            )
    # An evaluation has as many trajectories under way as the runners, beside them.
    trajectories = rollout.max_concurrent_trajectories * (2 if config.evaluation_sets else 1)
    return [
        EngineSpec(
            model_path=config.model.path,
            log_path=Path(config.output) / "logs" / f"engine-{index}.log",
            device=device.kind,
            dtype=config.model.dtype,
            host=rollout.host,
            port=rollout.engine_port + index if rollout.engine_port else 0,
            index=index,
            tensor=rollout.engine_tp,
            max_context=rollout.max_context,
            max_running=max(64, -(-trajectories // rollout.engines) + _SPARE_SLOTS),
            return_routes=want_routes,
            seed=config.seed + index,
            start_timeout_s=rollout.start_timeout_s,
            token=token,
            args=rollout.engine_args,
        )
        for index in range(rollout.engines)
    ]
