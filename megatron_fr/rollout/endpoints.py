"""The rollout service's HTTP interface (docs/ARCHITECTURE.md describes it)."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from megatron_fr.engines.fleet import Fleet
from megatron_fr.errors import CheckpointError, ConfigError, EngineError, MegatronFRError, RolloutEnded, TrajectoryError
from megatron_fr.rollout.event_loop_delay import EventLoopDelay
from megatron_fr.rollout.metrics import batch_metrics
from megatron_fr.rollout.probe import ProbeSampler
from megatron_fr.rollout.queue import LeasedBatch
from megatron_fr.rollout.state import encode_state, take_state
from megatron_fr.rollout.training import TrainingRollouts
from megatron_fr.trajectory import encode

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoints:
    """One handler a call of the interface.

    Args:
        evaluate: evaluates the weights that the engines hold; takes ``name``. None: there are no held-out prompts.
        failure: done with the reason once the run cannot go on.
        training: whether ``POST /start`` starts rollouts.
        version: version of the weights that the trainer begins with.
    """

    def __init__(
        self,
        fleet: Fleet,
        rollouts: TrainingRollouts,
        probe: ProbeSampler,
        *,
        evaluate: Callable[..., Awaitable[tuple[dict[str, float], int]]] | None,
        event_loop_delay: EventLoopDelay,
        failure: asyncio.Future[MegatronFRError],
        training: bool = True,
        version: int = 0,
    ) -> None:
        self._fleet = fleet
        self._rollouts = rollouts
        self._probe_sampler = probe
        self._run_evaluation = evaluate
        self._event_loop_delay = event_loop_delay
        self._failure = failure
        self._training = training
        self._version = version
        self._batches_at = time.monotonic()
        self._tokens_at_last_lease = 0
        self._leasing = asyncio.Lock()
        self._evaluating = asyncio.Lock()

    def application(self) -> web.Application:
        """The server application with all routes."""
        app = web.Application(middlewares=[_errors_as_json], client_max_size=2**20)
        app.add_routes(
            [
                web.get("/status", self._status),
                web.post("/start", self._start),
                web.get("/state", self._state),
                web.post("/lease", self._lease),
                web.get("/trajectories", self._trajectories),
                web.post("/commit", self._commit),
                web.post("/evaluate", self._evaluate),
                web.post("/probe", self._probe),
            ]
        )
        return app

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": self._version,
                "engines": self._fleet.urls,
                "queued": self._rollouts.queue.queued,
                "in_flight": self._rollouts.pool.in_flight,
                "consumed_batches": self._rollouts.gate.consumed_batches,
                "started": self._rollouts.gate.started,
                "finished": self._rollouts.pool.finished,
                "failed": self._rollouts.gate.failed,
                "dropped": self._rollouts.gate.dropped,
                "tokens_generated": self._fleet.tokens_generated,
            }
        )

    async def _start(self, request: web.Request) -> web.Response:
        """The engines hold the version that the trainer goes on from: rollouts of a restored run begin."""
        body = await _body(request, version=int)
        if body["version"] != self._version:
            raise CheckpointError(
                f"the trainer goes on from version {body['version']}, the rollout service from {self._version}; "
                "give both the same checkpoint"
            )
        self._raise_failure()
        self._fleet.set_version(self._version)
        if self._training:
            self._rollouts.pool.start()
        return web.json_response({})

    async def _state(self, _: web.Request) -> web.Response:
        # Taken in one go between two events; packing hundreds of megabytes of routes must not hold up the others.
        payload = await asyncio.to_thread(encode_state, take_state(self._rollouts, self._version))
        return web.Response(body=payload, content_type="application/octet-stream")

    async def _lease(self, request: web.Request) -> web.Response:
        body = await _body(request, version=int, wait_s=(int, float))
        deadline = time.monotonic() + float(body["wait_s"])
        async with self._leasing:
            while True:
                self._raise_failure()
                seen = self._rollouts.pool.finished
                batch = self._rollouts.queue.lease(body["version"])
                if batch is not None:
                    return web.json_response(self._leased(batch))
                left = deadline - time.monotonic()
                if left <= 0:
                    return web.Response(status=204)
                await self._unless_failed(self._rollouts.pool.wait_arrival(seen), within_s=left)

    def _leased(self, batch: LeasedBatch) -> dict[str, Any]:
        now, tokens = time.monotonic(), self._fleet.tokens_generated
        metrics = batch_metrics(batch.trajectories, batch.lags) | {
            "rollout/tokens_per_s": (tokens - self._tokens_at_last_lease) / max(1e-6, now - self._batches_at),
            "rollout/in_flight": float(self._rollouts.pool.in_flight),
            "rollout/queued": float(self._rollouts.queue.queued),
            "rollout/dropped_total": float(self._rollouts.gate.dropped),
            "rollout/failed_total": float(self._rollouts.gate.failed),
            "rollout/refused_total": float(self._rollouts.pool.refused),
            "rollout/event_loop_delay_ms": self._event_loop_delay.take_worst_ms(),
        }
        self._batches_at, self._tokens_at_last_lease = now, tokens
        items = [
            {
                "id": t.id,
                "group_id": t.group_id,
                "num_tokens": len(t),
                "num_action_tokens": t.num_action_tokens,
                "reward": t.reward,
                "lag": lag,
                "metadata": t.metadata,
                "info": t.info,
                "reward_parts": t.reward_parts,
            }
            for t, lag in zip(batch.trajectories, batch.lags, strict=True)
        ]
        return {"batch_id": batch.batch_id, "items": items, "metrics": metrics}

    async def _trajectories(self, request: web.Request) -> web.Response:
        ids = [i for i in request.query.get("ids", "").split(",") if i]
        # Routes of long trajectories make this hundreds of megabytes; the event loop must go on meanwhile.
        payload = await asyncio.to_thread(encode, self._rollouts.queue.fetch(ids))
        return web.Response(body=payload, content_type="application/octet-stream")

    async def _commit(self, request: web.Request) -> web.Response:
        body = await _body(request, batch_id=str, version=int, stepped=bool)
        if self._rollouts.commit(body["batch_id"]):
            self._version = max(self._version, body["version"])
            self._fleet.set_version(self._version)
        return web.json_response({})

    async def _evaluate(self, request: web.Request) -> web.Response:
        body = await _body(request, name=str)
        if self._run_evaluation is None:
            raise ConfigError("there are no held-out prompts to evaluate on; set data.eval or evaluation.sets")
        async with self._evaluating:
            result = await self._unless_failed(self._run_evaluation(name=body["name"]))
        assert result is not None
        metrics, count = result
        return web.json_response({"metrics": metrics, "num_trajectories": count})

    async def _probe(self, request: web.Request) -> web.Response:
        body = await _body(request, engine=str, max_tokens=int)
        self._raise_failure()
        client = self._fleet.client(body["engine"])
        try:
            trajectory = await self._probe_sampler.sample(client, max(1, body["max_tokens"]))
        except EngineError as error:
            # One failed request: the trainer may try again. If the engine died, it learns that then.
            raise web.HTTPBadGateway(text=json.dumps({"error": str(error)}), content_type="application/json") from error
        return web.Response(body=encode([trajectory]), content_type="application/octet-stream")

    async def _unless_failed[T](self, work: Awaitable[T], within_s: float | None = None) -> T | None:
        """The result of ``work``, or None when it takes longer; it is cancelled then.

        Raises:
            MegatronFRError: the run cannot go on; raised at once.
        """
        job = asyncio.ensure_future(work)
        waited_for: set[asyncio.Future[Any]] = {job, self._failure}
        try:
            await asyncio.wait(waited_for, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            self._raise_failure()
            return job.result() if job.done() else None
        finally:
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)

    def _raise_failure(self) -> None:
        if self._failure.done():
            raise self._failure.result()


async def _body(request: web.Request, **fields: type | tuple[type, ...]) -> dict[str, Any]:
    """The JSON body, checked for the fields an endpoint needs.

    Raises:
        web.HTTPBadRequest: a field is missing or of another type.
    """
    try:
        body = await request.json()
    except ValueError as error:
        raise _bad_request(f"{request.path}: the body is no JSON: {error}") from error
    for name, kind in fields.items():
        value = body.get(name) if isinstance(body, dict) else None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise _bad_request(f"{request.path}: {name}={value!r}, expected {kind}")
    return dict(body)


def _bad_request(reason: str) -> web.HTTPBadRequest:
    return web.HTTPBadRequest(text=json.dumps({"error": reason}), content_type="application/json")


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """410: the run is over; 404: no such trajectory; 400: the request makes no sense here; 502: the engine failed it;
    500: a bug."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400 or error.content_type == "application/json":
            raise
        return web.json_response({"error": f"{request.method} {request.path}: {error.reason}"}, status=error.status)
    except (RolloutEnded, EngineError) as error:
        return web.json_response({"error": str(error)}, status=410)
    except TrajectoryError as error:
        return web.json_response({"error": str(error)}, status=404)
    except MegatronFRError as error:
        return web.json_response({"error": str(error)}, status=400)
    except Exception as error:
        log.exception("%s %s", request.method, request.path)
        return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)
