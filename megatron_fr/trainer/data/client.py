"""The trainer's side of the rollout service's HTTP interface (docs/ARCHITECTURE.md)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import batched
from typing import Any

import httpx

from megatron_fr.errors import RequestFailed, RolloutEnded
from megatron_fr.runtime.access import bearer
from megatron_fr.trajectory import Trajectory, decode

#: They travel in the request line, which the service's HTTP server limits to 8 KiB.
_IDS_PER_REQUEST = 256
_PROBE_ATTEMPTS = 3
_PROBE_PAUSE_S = 0.5


@dataclass(frozen=True)
class LeasedItem:
    """What every rank knows of a trajectory; only its own ranks fetch the payload."""

    id: str
    group_id: str
    num_tokens: int
    num_action_tokens: int
    reward: float
    lag: int
    metadata: Mapping[str, Any] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    reward_parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Lease:
    """One batch: ``B`` trajectories in order of arrival, and their averages as metrics."""

    batch_id: str
    items: tuple[LeasedItem, ...]
    metrics: dict[str, float]


class RolloutClient:
    """Blocking client of the rollout service at ``url``.

    A call raises ``RolloutEnded`` with the service's reason when it cannot go on, else ``RequestFailed``.
    """

    def __init__(self, url: str, token: str) -> None:
        self.url, self.token = url, token
        # Repeats only failed connections: a request that reached the service may have taken effect.
        transport = httpx.HTTPTransport(retries=2)
        self._http = httpx.Client(base_url=url, trust_env=False, transport=transport, headers=bearer(token))

    def close(self) -> None:
        """Drop the connections."""
        self._http.close()

    def status(self) -> dict[str, Any]:
        """Counters, version and the engines' addresses."""
        return dict(self._call("GET", "/status").json())

    def start(self, version: int) -> None:
        """The engines hold ``version``: rollouts of a restored run may begin (others run already)."""
        self._call("POST", "/start", {"version": version})

    def state(self) -> bytes:
        """The service's part of a checkpoint, to be given to ``python -m megatron_fr.rollout --restore``."""
        return self._call("GET", "/state", timeout_s=600.0).content

    def lease(self, version: int, *, wait_s: float = 5.0) -> Lease | None:
        """The next batch, or None when none was complete within ``wait_s`` (at most 60)."""
        response = self._call("POST", "/lease", {"version": version, "wait_s": wait_s}, timeout_s=wait_s + 60.0)
        if response.status_code == 204:
            return None
        body = response.json()
        return Lease(body["batch_id"], tuple(LeasedItem(**item) for item in body["items"]), body["metrics"])

    def fetch(self, ids: Sequence[str]) -> list[Trajectory]:
        """Payloads of leased trajectories, in the order of ``ids``."""
        found: list[Trajectory] = []
        for part in batched(ids, _IDS_PER_REQUEST):
            found += decode(self._call("GET", "/trajectories", params={"ids": ",".join(part)}).content)
        return found

    def commit(self, batch_id: str, *, version: int, stepped: bool) -> None:
        """The batch is used up, the engines hold ``version``: forget it and open the gate."""
        self._call("POST", "/commit", {"batch_id": batch_id, "version": version, "stepped": stepped})

    def evaluate(self, name: str) -> dict[str, float]:
        """Run the held-out evaluation and wait for it."""
        return dict(self._call("POST", "/evaluate", {"name": name}, timeout_s=3600.0).json()["metrics"])

    def probe(self, engine: str, *, max_tokens: int, timeout_s: float) -> Trajectory:
        """A fresh trajectory of ``engine``, from several attempts that take ``timeout_s`` together."""
        body = {"engine": engine, "max_tokens": max_tokens}
        deadline = time.monotonic() + timeout_s
        for left in range(_PROBE_ATTEMPTS, 0, -1):
            # An equal part of what is left, pauses included: the last attempt ends at the deadline.
            share = (deadline - time.monotonic()) / left
            try:
                return decode(self._call("POST", "/probe", body, timeout_s=max(share, 0.1)).content)[0]
            except RequestFailed as error:
                last = error
            time.sleep(min(_PROBE_PAUSE_S, 0.1 * share) if left > 1 else 0)
        raise RequestFailed(f"engine {engine} answered none of {_PROBE_ATTEMPTS} probes; last: {last}") from last

    def _call(
        self, method: str, path: str, body: Any = None, *, params: dict[str, str] | None = None, timeout_s: float = 60.0
    ) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body, params=params, timeout=timeout_s)
        except httpx.ConnectError as error:
            raise RolloutEnded(f"rollout service {self.url} is gone: {error}") from error
        except httpx.HTTPError as error:
            raise RequestFailed(f"rollout service {self.url}{path}: {type(error).__name__}: {error}") from error
        if response.status_code >= 400:
            reason = f"rollout service {self.url}{path}: HTTP {response.status_code}"
            with suppress(ValueError):
                reason = response.json().get("error") or reason
            raise RolloutEnded(reason) if response.status_code == 410 else RequestFailed(reason)
        return response


def in_thread[T](call: Callable[[], T]) -> Future[T]:
    """Run ``call`` in a thread that does not keep the process alive."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer
