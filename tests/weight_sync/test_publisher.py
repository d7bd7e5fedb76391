"""Engines that never join the update group: an error that names them, within the time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from megatron_fr.errors import SyncError
from megatron_fr.weight_sync.engine_layout import Stored
from megatron_fr.weight_sync.publisher import WeightPublisher


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes every request and answers none while the test runs."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            ended.wait(60)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    ended.set()
    server.shutdown()
    server.server_close()


def publisher(*engines: str) -> WeightPublisher:
    return WeightPublisher(
        engines,
        layout={},
        verify=False,
        dtype="float32",
        engine_world_size=1,
        backend="gloo",
        host="127.0.0.1",
        max_bucket_bytes=1000,
        timeout_s=3,
    )


def test_an_engine_that_does_not_join_is_named_within_the_time_limit(silent: str) -> None:
    made = publisher(silent)
    started = time.monotonic()
    with pytest.raises(SyncError, match=f"did not form within 3 s; engines that did not join: {silent}"):
        made.connect()
    assert time.monotonic() - started < 15
    made.close()


def test_nothing_is_published_before_the_group_exists(silent: str) -> None:
    made = publisher(silent)
    with pytest.raises(SyncError, match="publish before connect"):
        made.publish(iter([("t", torch.zeros(1))]), 1)
    made.close()


def test_what_cannot_be_compared_is_said_once_for_each_engine(caplog: pytest.LogCaptureFixture) -> None:
    made = publisher("http://a", "http://b", "http://c")
    made._layout = {"x.experts.0.down_proj.weight": Stored("x.experts.w2_weight", lambda t, r, s: t, True, True)}
    plain = {"dtype": "float32", "moe_runner_backend": "triton"}
    infos = [plain, plain | {"quantization": "fp8"}, plain | {"moe_runner_backend": "flashinfer_trtllm"}]
    assert made._checkable(infos) == {"http://a": True, "http://c": False}
    assert [record.getMessage() for record in caplog.records] == [
        "engine http://b: no checksum of its weights is compared, because of its quantization=fp8",
        "engine http://c: no checksum of its experts is compared, because of its moe_runner_backend=flashinfer_trtllm",
    ]
    made.close()
