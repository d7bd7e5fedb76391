"""The rollout service's HTTP interface (docs/ARCHITECTURE.md describes it)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from megatron_fr.engines.fleet import Fleet
from megatron_fr.errors import CheckpointError, ConfigError, EngineError, MegatronFRError, RolloutEnded, TrajectoryError
from megatron_fr.rollout.metrics import batch_metrics
from megatron_fr.rollout.probe import ProbeSampler
from megatron_fr.rollout.queue import LeasedBatch
from megatron_fr.rollout.runner import TrainingRollouts
from megatron_fr.rollout.state import encode_state, take_state
from megatron_fr.rollout.watchdog import EventLoopDelay
from megatron_fr.runtime.access import TOKEN_FILE, shows
from megatron_fr.trajectory import encode

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_BODY_BYTES = 64 * 1024
_MAX_WAIT_S = 60
#: What a lease tells of each trajectory, beside its length and lag.
_LEASED_FIELDS = ("id", "group_id", "num_action_tokens", "reward", "reward_parts", "metadata", "info")


@dataclass
class Endpoints:
    """One handler a call of the interface."""

    fleet: Fleet
    rollouts: TrainingRollouts
    probe: ProbeSampler
    evaluate: Callable[..., Awaitable[tuple[dict[str, float], int]]] | None  # takes ``name``; None: nothing held out
    event_loop_delay: EventLoopDelay
    failure: asyncio.Future[MegatronFRError]  # done with the reason once the run cannot go on
    agent_metrics: Callable[[], Mapping[str, float]] = dict
    training: bool = True  # whether ``POST /start`` starts rollouts
    version: int = 0  # of the weights that the trainer has reached
    _leased_at: float = field(default_factory=time.monotonic, init=False)
    _tokens_at_last_lease: int = field(default=0, init=False)
    _leasing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _evaluating: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def runner(self, token: str) -> web.AppRunner:
        """The server; a request whose client hangs up is cancelled, so that it holds nothing."""
        app = self.application(token)
        return web.AppRunner(app, shutdown_timeout=0.2, access_log=None, handler_cancellation=True)

    def application(self, token: str) -> web.Application:
        """The server application with all routes; requests must show ``token``."""

        @web.middleware
        async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
            if not shows(request.headers.get("Authorization"), token):
                raise web.HTTPUnauthorized(reason=f"show the token of the run's {TOKEN_FILE} as a bearer token")
            return await handler(request)

        app = web.Application(middlewares=[_errors_as_json, admit], client_max_size=_BODY_BYTES)
        app.router.add_get("/status", self._status)
        app.router.add_post("/start", self._start)
        app.router.add_get("/state", self._state)
        app.router.add_post("/lease", self._lease)
        app.router.add_get("/trajectories", self._trajectories)
        app.router.add_post("/commit", self._commit)
        app.router.add_post("/evaluate", self._evaluate)
        app.router.add_post("/probe", self._probe)
        return app

    async def _status(self, _: web.Request) -> web.Response:
        gate, queue, pool = self.rollouts.gate, self.rollouts.queue, self.rollouts.pool
        return web.json_response(
            {
                "version": self.version,
                "engines": self.fleet.urls,
                "queued": queue.queued,
                "in_flight": pool.in_flight,
                "waiting_for": pool.waiting_for(),
                "consumed_batches": gate.consumed_batches,
                "started": gate.started,
                "finished": pool.finished,
                "failed": gate.failed,
                "failed_prompts": len(self.rollouts.failed.reasons),
                "dropped": gate.dropped,
                "tokens_generated": self.fleet.tokens_generated,
            }
        )

    async def _start(self, request: web.Request) -> web.Response:
        """The engines hold the version that the trainer goes on from: rollouts of a restored run begin."""
        body = await _body(request, version=int)
        if body["version"] != self.version:
            versions = f"version {body['version']}, the rollout service from {self.version}"
            raise CheckpointError(f"the trainer goes on from {versions}; give both the same checkpoint")
        self._raise_failure()
        self.fleet.start_from(self.version)
        if self.training:
            self.rollouts.pool.start()
        return web.json_response({})

    async def _state(self, _: web.Request) -> web.Response:
        # Taken in one go between two events; packing hundreds of megabytes of routes must not hold up the others.
        payload = await asyncio.to_thread(encode_state, take_state(self.rollouts, self.version))
        return web.Response(body=payload, content_type="application/octet-stream")

    async def _lease(self, request: web.Request) -> web.Response:
        body = await _body(request, version=int, wait_s=(int, float))
        if not 0 <= body["wait_s"] <= _MAX_WAIT_S:  # also NaN
            raise MegatronFRError(f"{request.path}: wait_s={body['wait_s']}, expected 0 to {_MAX_WAIT_S} seconds")
        if body["version"] > self.version:
            versions = f"version={body['version']}, the rollout service has version {self.version}"
            raise MegatronFRError(f"{request.path}: {versions}; commit the batch before first")
        deadline = time.monotonic() + float(body["wait_s"])
        async with self._leasing:
            while True:
                self._raise_failure()
                seen = self.rollouts.pool.finished
                if (batch := self.rollouts.queue.lease(body["version"])) is not None:
                    return web.json_response(self._leased(batch))
                if (left := deadline - time.monotonic()) <= 0:
                    return web.Response(status=204)
                await self._unless_failed(self.rollouts.pool.wait_arrival(seen), within_s=left)

    def _leased(self, batch: LeasedBatch) -> dict[str, Any]:
        now, tokens = time.monotonic(), self.fleet.tokens_generated
        metrics = (
            batch_metrics(batch.trajectories, batch.lags)
            | dict(self.agent_metrics())
            | {
                "rollout/tokens_per_s": (tokens - self._tokens_at_last_lease) / max(1e-6, now - self._leased_at),
                "rollout/in_flight": float(self.rollouts.pool.in_flight),
                "rollout/queued": float(self.rollouts.queue.queued),
                "rollout/dropped_total": float(self.rollouts.gate.dropped),
                "rollout/failed_total": float(self.rollouts.gate.failed),
                "rollout/refused_total": float(self.rollouts.pool.refused),
                "rollout/failure_rate": self.rollouts.failed.rate,
                "rollout/failed_prompts": float(len(self.rollouts.failed.reasons)),
                "rollout/event_loop_delay_ms": self.event_loop_delay.take_worst_ms(),
            }
        )
        self._leased_at, self._tokens_at_last_lease = now, tokens
        items = [
            {name: getattr(t, name) for name in _LEASED_FIELDS} | {"num_tokens": len(t), "lag": lag}
            for t, lag in zip(batch.trajectories, batch.lags, strict=True)
        ]
        return {"batch_id": batch.batch_id, "items": items, "metrics": metrics}

    async def _trajectories(self, request: web.Request) -> web.Response:
        ids = [i for i in request.query.get("ids", "").split(",") if i]
        # Routes of long trajectories make this hundreds of megabytes; the event loop must go on meanwhile.
        payload = await asyncio.to_thread(encode, self.rollouts.queue.fetch(ids))
        return web.Response(body=payload, content_type="application/octet-stream")

    async def _commit(self, request: web.Request) -> web.Response:
        body = await _body(request, batch_id=str, version=int, stepped=bool)
        if self.rollouts.commit(body["batch_id"]):
            self.version = max(self.version, body["version"])
            self.fleet.set_version(self.version)
        return web.json_response({})

    async def _evaluate(self, request: web.Request) -> web.Response:
        body = await _body(request, name=str)
        if self.evaluate is None:
            raise ConfigError("there are no held-out prompts to evaluate on; set data.eval or evaluation.sets")
        async with self._evaluating:
            result = await self._unless_failed(self.evaluate(name=body["name"]))
        assert result is not None
        return web.json_response({"metrics": result[0], "num_trajectories": result[1]})

    async def _probe(self, request: web.Request) -> web.Response:
        body = await _body(request, engine=str, max_tokens=int)
        most = self.probe.limits.max_context - 1  # the prompt has one at least
        if not 0 < body["max_tokens"] <= most:
            raise MegatronFRError(f"{request.path}: max_tokens={body['max_tokens']}, expected 1 to {most}")
        self._raise_failure()
        client = self.fleet.client(body["engine"])
        try:
            trajectory = await self.probe.sample(client, body["max_tokens"])
        except EngineError as error:
            # One failed request: the trainer may try again. If the engine died, it learns that then.
            return web.json_response({"error": str(error)}, status=502)
        return web.Response(body=encode([trajectory]), content_type="application/octet-stream")

    async def _unless_failed[T](self, work: Awaitable[T], within_s: float | None = None) -> T | None:
        """The result of ``work``, or None when it takes longer; raises the run's failure as soon as there is one."""
        job = asyncio.ensure_future(work)
        waited_for: set[asyncio.Future[Any]] = {job, self.failure}
        try:
            await asyncio.wait(waited_for, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            self._raise_failure()
            return job.result() if job.done() else None
        finally:
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)

    def _raise_failure(self) -> None:
        if self.failure.done():
            raise self.failure.result()


async def _body(request: web.Request, **fields: type | tuple[type, ...]) -> dict[str, Any]:
    """The JSON body, checked for the fields an endpoint needs."""
    try:
        body = await request.json()
    except (ValueError, LookupError, RecursionError) as error:  # also an unknown charset, and nesting without end
        raise MegatronFRError(f"{request.path}: the body is no JSON: {error}") from error
    for name, kind in fields.items():
        value = body.get(name) if isinstance(body, dict) else None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise MegatronFRError(f"{request.path}: {name}={value!r}, expected {kind}")
    return dict(body)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """410: the run is over; 404: no such trajectory; 400: the request makes no sense here; 500: a bug."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        status, reason = error.status, f"{request.method} {request.path}: {error.reason}"
    except (RolloutEnded, EngineError) as error:
        status, reason = 410, str(error)
    except TrajectoryError as error:
        status, reason = 404, str(error)
    except MegatronFRError as error:
        status, reason = 400, str(error)
    except Exception as error:
        log.exception("%s %s", request.method, request.path)
        status, reason = 500, f"{type(error).__name__}: {error}"
    return web.json_response({"error": reason}, status=status)
