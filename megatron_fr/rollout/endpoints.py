"""The rollout service's HTTP interface (docs/ARCHITECTURE.md describes it)."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from megatron_fr.agents.contract import Outcome, Prompt
from megatron_fr.config import RunConfig
from megatron_fr.engines.fleet import Fleet
from megatron_fr.errors import CheckpointError, ConfigError, EngineError, MegatronFRError, RolloutEnded, TrajectoryError
from megatron_fr.rollout.episode import EpisodePlayer
from megatron_fr.rollout.evaluate import HeldOut, evaluate_sets
from megatron_fr.rollout.event_loop_delay import EventLoopDelay
from megatron_fr.rollout.metrics import batch_metrics
from megatron_fr.rollout.queue import Batch, TrajectoryQueue
from megatron_fr.rollout.runner import RunnerPool
from megatron_fr.rollout.session import EngineSession
from megatron_fr.rollout.staleness import StalenessGate
from megatron_fr.rollout.state import StatefulParts, encode_state
from megatron_fr.trajectory import Trajectory, encode

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Parts:
    """What the endpoints work on; ``failure`` is done once the run cannot go on."""

    config: RunConfig
    tokenizer: Any
    prompts: Sequence[Prompt]
    held_out: Sequence[HeldOut]
    fleet: Fleet
    gate: StalenessGate
    queue: TrajectoryQueue
    pool: RunnerPool
    player: EpisodePlayer
    lag: EventLoopDelay
    failure: asyncio.Future[MegatronFRError]
    state: StatefulParts
    training: bool


class Endpoints:
    """One handler a call of the interface."""

    def __init__(self, parts: Parts, version: int = 0) -> None:
        self._parts = parts
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
                "engines": self._parts.fleet.urls,
                "queued": self._parts.queue.queued,
                "in_flight": self._parts.pool.in_flight,
                "consumed_batches": self._parts.gate.consumed_batches,
                "started": self._parts.gate.started,
                "finished": self._parts.pool.finished,
                "failed": self._parts.gate.failed,
                "dropped": self._parts.gate.dropped,
                "tokens_generated": self._parts.fleet.tokens_generated,
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
        self._parts.fleet.set_version(self._version)
        if self._parts.training:
            self._parts.pool.start()
        return web.json_response({})

    async def _state(self, _: web.Request) -> web.Response:
        # Taken in one go between two events; packing hundreds of megabytes of routes must not hold up the others.
        payload = await asyncio.to_thread(encode_state, self._parts.state.snapshot(self._version))
        return web.Response(body=payload, content_type="application/octet-stream")

    async def _lease(self, request: web.Request) -> web.Response:
        body = await _body(request, version=int, wait_s=(int, float))
        deadline = time.monotonic() + float(body["wait_s"])
        async with self._leasing:
            while True:
                self._raise_failure()
                seen = self._parts.pool.finished
                batch = self._parts.queue.lease(body["version"])
                if batch is not None:
                    return web.json_response(self._leased(batch))
                left = deadline - time.monotonic()
                if left <= 0:
                    return web.Response(status=204)
                arrival = asyncio.ensure_future(self._parts.pool.wait_arrival(seen))
                waited_for: set[asyncio.Future[Any]] = {arrival, self._parts.failure}
                try:
                    await asyncio.wait(waited_for, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    arrival.cancel()

    def _leased(self, batch: Batch) -> dict[str, Any]:
        now, tokens = time.monotonic(), self._parts.fleet.tokens_generated
        metrics = batch_metrics(batch.trajectories, batch.lags) | {
            "rollout/tokens_per_s": (tokens - self._tokens_at_last_lease) / max(1e-6, now - self._batches_at),
            "rollout/in_flight": float(self._parts.pool.in_flight),
            "rollout/queued": float(self._parts.queue.queued),
            "rollout/dropped_total": float(self._parts.gate.dropped),
            "rollout/failed_total": float(self._parts.gate.failed),
            "rollout/refused_total": float(self._parts.pool.refused),
            "rollout/event_loop_delay_ms": self._parts.lag.take_worst_ms(),
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
        payload = await asyncio.to_thread(encode, self._parts.queue.fetch(ids))
        return web.Response(body=payload, content_type="application/octet-stream")

    async def _commit(self, request: web.Request) -> web.Response:
        body = await _body(request, batch_id=str, version=int, stepped=bool)
        if self._parts.queue.commit(body["batch_id"]):
            self._parts.gate.commit()
            self._version = max(self._version, body["version"])
            self._parts.fleet.set_version(self._version)
            self._parts.pool.wake()
        return web.json_response({})

    async def _evaluate(self, request: web.Request) -> web.Response:
        body = await _body(request, name=str)
        if not self._parts.held_out:
            raise ConfigError("there are no held-out prompts to evaluate on; set data.eval or evaluation.sets")
        async with self._evaluating:
            job = asyncio.ensure_future(
                evaluate_sets(
                    self._parts.player,
                    self._parts.held_out,
                    pass_threshold=self._parts.config.evaluation.pass_threshold,
                    concurrency=self._parts.config.rollout.max_concurrent_trajectories,
                    name=body["name"],
                )
            )
            waited_for: set[asyncio.Future[Any]] = {job, self._parts.failure}
            try:
                await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
                self._raise_failure()
                metrics, count = job.result()
            finally:
                job.cancel()
                await asyncio.gather(job, return_exceptions=True)
        return web.json_response({"metrics": metrics, "num_trajectories": count})

    async def _probe(self, request: web.Request) -> web.Response:
        body = await _body(request, engine=str, max_tokens=int)
        self._raise_failure()
        trajectory = await self._probe_trajectory(body["engine"], max(1, body["max_tokens"]))
        return web.Response(body=encode([trajectory]), content_type="application/octet-stream")

    async def _probe_trajectory(self, engine: str, max_tokens: int) -> Trajectory:
        prompt = random.choice(self._parts.prompts)
        session = EngineSession(
            self._parts.fleet.client(engine),
            self._parts.player.limits,
            max_new_tokens=max_tokens,
            want_routes=self._parts.player.want_routes,
            probe=True,
        )
        session.observe(self._encode_prompt(prompt)[: self._parts.player.limits.max_context - max_tokens])
        try:
            generation = await session.generate(stop_token_ids=[])
        except EngineError as error:
            # One failed request: the trainer may try again. If the engine died, it learns that then.
            raise web.HTTPBadGateway(text=json.dumps({"error": str(error)}), content_type="application/json") from error
        trajectory = session.finish(
            Outcome((), generation.finish_reason, 1),
            trajectory_id="probe",
            prompt_id=prompt.id,
            group_id="probe",
            reward=0.0,
            reward_parts={},
        )
        trajectory.validate(self._parts.player.limits)
        return trajectory

    def _encode_prompt(self, prompt: Prompt) -> list[int]:
        messages = [dict(m) for m in prompt.messages]
        if getattr(self._parts.tokenizer, "chat_template", None):
            options = self._parts.config.agent.chat_template_kwargs
            text = self._parts.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **options
            )
        else:
            text = "\n".join(str(m.get("content")) for m in messages)
        return list(self._parts.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _raise_failure(self) -> None:
        if self._parts.failure.done():
            raise self._parts.failure.result()


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
