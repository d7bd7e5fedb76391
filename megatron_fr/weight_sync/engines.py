"""The engines' HTTP interface during a weight sync: every engine is asked at once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx

from megatron_fr.errors import SyncError
from megatron_fr.runtime.access import bearer


class EngineCalls:
    """Calls engines by their base addresses; one request may take ``timeout_s`` seconds. Owned by trainer rank 0.

    ``token`` is what the engines were started with.
    """

    def __init__(self, urls: Sequence[str], timeout_s: float, token: str | None = None) -> None:
        self.urls = list(urls)
        self._timeout_s = timeout_s
        self._http = httpx.Client(timeout=timeout_s, trust_env=False, headers=bearer(token))
        self._threads = ThreadPoolExecutor(max(1, len(self.urls)), thread_name_prefix="weight-sync")

    def start(self, url: str, path: str, body: Mapping[str, Any]) -> Future[Any]:
        """POST ``body`` to one engine in a thread; the future has the answer's JSON, or a SyncError."""
        return self._threads.submit(self._post, url, path, body)

    def post(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """POST ``body`` to every engine; returns the answers' JSON in the order of ``urls``, or raises SyncError."""
        return [future.result() for future in [self.start(url, path, body) for url in self.urls]]

    def close(self) -> None:
        """Drop the connections and end the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def _post(self, url: str, path: str, body: Mapping[str, Any]) -> Any:
        try:
            response = self._http.post(url + path, json=dict(body))
        except httpx.HTTPError as error:
            reason = f"the connection broke off ({type(error).__name__}: {error}); see the engine's log"
            if isinstance(error, httpx.TimeoutException):
                reason = f"no answer within sync.timeout_s={self._timeout_s:g}; see the engine's log, or raise it"
            raise SyncError(f"engine {url}{path}: {reason}") from error
        try:
            answer = response.json()
        except ValueError:
            answer = None
        # SGLang also says "success: false" with status 200.
        if response.status_code != 200 or (isinstance(answer, dict) and answer.get("success") is False):
            said = answer.get("message") if isinstance(answer, dict) else response.text
            text = re.sub(r"\s+", " ", str(said))[:500]
            raise SyncError(f"engine {url}{path}: HTTP {response.status_code}: {text}")
        return answer
