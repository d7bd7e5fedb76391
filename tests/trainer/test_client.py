from __future__ import annotations

from typing import Any

import httpx
import pytest

from megatron_fr.errors import RequestFailed, RolloutEnded
from megatron_fr.trainer.data import client as client_module
from megatron_fr.trainer.data.client import RolloutClient
from megatron_fr.trajectory import encode
from tests.support.samples import trajectory


def test_the_payloads_of_a_large_batch_come_in_order_over_request_lines_that_a_server_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = RolloutClient("http://service", "token")
    lines: list[int] = []

    def request(method: str, path: str, *, params: dict[str, str], **_: Any) -> httpx.Response:
        lines.append(len(str(httpx.URL("http://service" + path, params=params))))
        return httpx.Response(200, content=encode([trajectory(i) for i in params["ids"].split(",")]))

    monkeypatch.setattr(client._http, "request", request)
    ids = [f"{i // 8:06d}-{i % 8}-retry1" for i in range(600)]
    assert [t.id for t in client.fetch(ids)] == ids
    assert len(lines) == 3
    assert max(lines) < 8190
    assert client.fetch([]) == []


def probing(monkeypatch: pytest.MonkeyPatch, *answers: httpx.Response | Exception) -> tuple[RolloutClient, list[float]]:
    """A client whose service gives these answers in turn, and the time-outs of its requests."""
    client = RolloutClient("http://service", "token")
    timeouts: list[float] = []

    def request(method: str, path: str, *, timeout: float, **_: Any) -> httpx.Response:
        assert (method, path) == ("POST", "/probe")
        timeouts.append(timeout)
        given = answers[len(timeouts) - 1]
        if isinstance(given, Exception):
            raise given
        return given

    monkeypatch.setattr(client._http, "request", request)
    monkeypatch.setattr(client_module, "_PROBE_PAUSE_S", 0.0)
    return client, timeouts


FAILED = httpx.Response(502, json={"error": "engine http://e/generate: HTTP 500"})


def test_a_probe_that_failed_or_was_not_answered_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = httpx.Response(200, content=encode([trajectory("probe")]))
    client, timeouts = probing(monkeypatch, FAILED, httpx.ReadTimeout("timed out"), sound)
    assert client.probe("http://e", max_tokens=4, timeout_s=90).id == "probe"
    # Each attempt may take its part of what is left of the 90 s.
    assert timeouts == pytest.approx([30, 45, 90], abs=3)


def test_a_probe_that_fails_again_and_again_names_the_engine_and_the_last_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, timeouts = probing(monkeypatch, *[FAILED] * 4)
    with pytest.raises(RequestFailed, match=r"engine http://e answered none of 3 probes; last: .*/generate: HTTP 500"):
        client.probe("http://e", max_tokens=4, timeout_s=90)
    assert len(timeouts) == 3


def test_a_probe_is_not_repeated_once_the_service_cannot_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    client, timeouts = probing(monkeypatch, FAILED, httpx.Response(410, json={"error": "engine 0 died"}), FAILED)
    with pytest.raises(RolloutEnded, match=r"^engine 0 died$") as caught:
        client.probe("http://e", max_tokens=4, timeout_s=90)
    assert not isinstance(caught.value, RequestFailed)
    assert len(timeouts) == 2
