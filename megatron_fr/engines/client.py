"""Client of one engine's ``/generate``: tokens in, tokens out."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt

from megatron_fr.errors import EngineError
from megatron_fr.trajectory import FinishReason, ModelLimits

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
# Sampling and training must use the same distribution, whatever a model's generation_config.json says.
_ALL_TOKENS = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
_NO_PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class Completion:
    """Sampled tokens of one request."""

    token_ids: list[int]  #: a matched stop token is the last one
    logprobs: list[float]  #: natural log in the tempered distribution, one for each token
    versions: list[int]  #: policy version of each token; it may be too old, never too new
    finish_reason: FinishReason
    routes: npt.NDArray[Any] | None = None  #: ``[rows, layers, top_k]`` from the requested row on
    route_error: str | None = None  #: why routes that were asked for are None
    cached_tokens: int = 0  #: prompt tokens whose keys and values came from the prefix cache


class EngineClient:
    """Sends requests of all trajectories to one engine; ``http`` must not limit the number of connections."""

    def __init__(
        self, url: str, http: aiohttp.ClientSession, *, limits: ModelLimits, temperature: float, timeout_s: float
    ) -> None:
        self.url = url
        self.version = 0  #: newest policy version that this engine is known to hold
        self.tokens_generated = 0  #: by all requests so far
        self._http = http
        self._limits = limits
        self._temperature = temperature
        self._timeout_s = timeout_s
        self._unique = itertools.count()
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Read nothing from here on that the engine's prefix cache holds so far: a version may name other weights now.

        The cache outlives its clients, so keys must be unique in the world.
        """
        self._cache = uuid.uuid4().hex

    async def generate(
        self,
        input_ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] = (),
        routes_from: int | None = None,
        ignore_eos: bool = False,
        fresh: bool = False,
        reuse_prefix: bool = True,
        temperature: float | None = None,
    ) -> Completion:
        """Sample after ``input_ids``.

        The prefix cache is keyed by client and :attr:`version`: a request reads no keys and values of older weights.

        Args:
            routes_from: first row of routes to ask for; None asks for no routes.
            fresh: read nothing from the prefix cache, and take the engine's version labels as they are.
            reuse_prefix: False reads nothing from the prefix cache, for a request that goes on after an abort.
            temperature: replaces the run's own, for evaluations.

        Raises:
            EngineError: the engine cannot be reached, refused the request, or answered something unusable.
        """
        sent_at = self.version
        part = f"fresh-{next(self._unique)}" if fresh or not reuse_prefix else f"version-{sent_at}"
        body: dict[str, Any] = {
            "input_ids": list(input_ids),
            "sampling_params": {
                **_ALL_TOKENS,
                **_NO_PENALTIES,
                "temperature": self._temperature if temperature is None else temperature,
                "max_new_tokens": max_new_tokens,
                "stop_token_ids": list(stop_token_ids),
                "ignore_eos": ignore_eos,
            },
            "return_logprob": True,
            "extra_key": f"{self._cache}-{part}",
        }
        if routes_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": routes_from}
        try:
            completion = self._read(await self._post(body), None if fresh else sent_at, routes_from is not None)
        except ValueError as error:
            raise EngineError(f"engine {self.url}/generate: unusable answer: {error}") from error
        if completion.versions:
            self.version = max(self.version, completion.versions[-1])
        self.tokens_generated += len(completion.token_ids)
        return completion

    async def _post(self, body: Mapping[str, Any]) -> Any:
        url = f"{self.url}/generate"
        try:
            async with self._http.post(url, json=body, timeout=aiohttp.ClientTimeout(self._timeout_s)) as answer:
                payload = await answer.read()
        except TimeoutError as error:
            raise EngineError(
                f"engine {url}: no answer within rollout.request_timeout_s={self._timeout_s:g}"
            ) from error
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            raise EngineError(f"engine {url}: {type(error).__name__}: {error}") from error
        if answer.status != 200:
            raise EngineError(f"engine {url}: HTTP {answer.status}: {payload[:500].decode(errors='replace')}")
        try:
            return json.loads(payload)
        except ValueError as error:
            raise ValueError(f"no JSON: {payload[:200]!r}") from error

    def _read(self, answer: Any, sent_at: int | None, want_routes: bool) -> Completion:
        """Check an answer; raises ValueError where it is unusable."""
        if not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
            raise ValueError(f"no meta_info in {str(answer)[:200]}")
        token_ids, meta = answer.get("output_ids"), answer["meta_info"]
        if not isinstance(token_ids, list) or not all(type(t) is int for t in token_ids):
            raise ValueError(f"output_ids is {str(token_ids)[:100]}, expected a list of token ids")
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._limits.vocab_size:
            raise ValueError(f"output_ids holds an id outside 0..{self._limits.vocab_size - 1}")
        finish = (meta.get("finish_reason") or {}).get("type")
        if finish not in _FINISH:
            raise ValueError(f"finish_reason is {meta.get('finish_reason')!r}, expected a type of {sorted(_FINISH)}")
        logprobs = _read_logprobs(meta.get("output_token_logprobs"), token_ids)
        labels = _read_versions(meta.get("weight_versions"), len(token_ids))
        routes, route_error = None, None
        if want_routes and token_ids:
            routes, route_error = read_routes(meta.get("routed_experts"), self._limits)
            if meta.get("num_retractions") and len(set(labels)) > 1:
                # A retracted request was computed again under newer weights, and the old tokens' rows with it.
                routes, route_error = None, "the engine retracted the request across a weight update"
        versions, cached = older_side(labels, sent_at), int(meta.get("cached_tokens") or 0)
        return Completion(token_ids, logprobs, versions, _FINISH[finish], routes, route_error, cached)


def _read_logprobs(rows: Any, token_ids: Sequence[int]) -> list[float]:
    """Read the first column of SGLang's ``output_token_logprobs``."""
    if not token_ids and not rows:
        return []
    if not isinstance(rows, list) or len(rows) != len(token_ids):
        got = len(rows) if isinstance(rows, list) else type(rows).__name__
        raise ValueError(f"output_token_logprobs has {got} rows for {len(token_ids)} tokens")
    values: list[float] = []
    for i, (row, token) in enumerate(zip(rows, token_ids, strict=True)):
        match row:
            case [int() | float() as value, given, *_] if given == token and math.isfinite(value):
                values.append(float(value))
            case _:
                raise ValueError(f"output_token_logprobs[{i}] is {row!r}, expected a finite number and token {token}")
    return values


def _read_versions(spans: Any, num_tokens: int) -> list[int]:
    """Read one version for each token from SGLang's spans ``{"version", "start", "end"}``."""
    if num_tokens == 0:
        return []
    labels: list[int] = []
    try:
        for span in spans:
            if span["start"] != len(labels):
                raise ValueError(f"weight_versions {spans!r} leave a gap or overlap")
            labels += [int(span["version"])] * (span["end"] - span["start"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"weight_versions is {spans!r}, expected a list of spans") from error
    if len(labels) != num_tokens:
        raise ValueError(f"weight_versions {spans!r} cover {len(labels)} of {num_tokens} tokens")
    return labels


def older_side(labels: Sequence[int], sent_at: int | None) -> list[int]:
    """Correct the engine's labels so that none is newer than the version that sampled the token.

    SGLang labels the token of a forward under way with the new version. So each token gets the label of the one before
    it, and the first one the version at which the request was sent, if that is older.
    """
    if not labels:
        return []
    first = labels[0] if sent_at is None else min(labels[0], sent_at)
    return [first, *labels[:-1]]


def read_routes(encoded: Any, limits: ModelLimits) -> tuple[npt.NDArray[Any] | None, str | None]:
    """Decode base64 of int32 to routes ``[rows, layers, top_k]``; returns None and the reason where it fails."""
    if encoded is None:
        return None, "the engine returned no routes"
    try:
        flat = np.frombuffer(base64.b64decode(encoded, validate=True), dtype=np.int32)
    except (ValueError, TypeError) as error:
        return None, f"the engine returned routes that cannot be decoded: {error}"
    layers = limits.num_moe_layers + len(limits.dense_layers)
    row = layers * limits.top_k
    if row == 0 or flat.size == 0 or flat.size % row:
        return None, f"the engine returned {flat.size} route entries, no multiple of {row} (layers x top-k)"
    routes = np.delete(flat.reshape(-1, layers, limits.top_k), limits.dense_layers, axis=1)
    if routes.min() < 0 or routes.max() >= limits.num_experts:
        found = f"{routes.min()} to {routes.max()}"
        return None, f"the engine's routes name experts {found}, the model has {limits.num_experts}"
    return routes.astype(limits.route_dtype), None
