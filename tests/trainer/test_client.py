from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
from samples import trajectory

from megatron_fr.trainer.client import RolloutClient
from megatron_fr.trajectory import encode


def test_the_payloads_of_a_large_batch_come_in_order_over_request_lines_that_a_server_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = RolloutClient("http://service")
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
