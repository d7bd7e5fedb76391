"""What a push must have, and how what cannot be reached is named, without an engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from megatron_fr.config.sections import SyncConfig
from megatron_fr.errors import ConfigError, SyncError
from megatron_fr.weight_sync.publisher import WeightPublisher
from tests.support.transports import make_context, weights
from tools.tiny import make_untrained


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_untrained(tmp_path_factory.mktemp("model") / "moe", family="qwen3_moe")


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda named: named[:-1],
            r"the push has 68 tensors, the model 69; the first that is missing is \('lm_head.weight', \(",
        ),
        (
            lambda named: named[:3] + named[4:],
            r"tensor 4 of the push is \('.*v_proj.weight', .*\); number 4 of the model's 69 is \('.*k_",
        ),
        (lambda named: named + named[-1:], r"tensor 70 of the push is \('lm_head.weight', .* is None"),
        (lambda named: [("x", named[0][1])], r"tensor 1 of the push is \('x', .*the model's 69 is \('model.embed_tok"),
        (
            lambda named: [(named[0][0], named[0][1].T), *named[1:]],
            r"tensor 1 of the push is \('model.embed_tokens.weight', \(96, 514\)\); .*\(514, 96\)\)",
        ),
        (lambda named: [], "the push has 0 tensors"),
    ],
)
def test_a_push_that_lacks_a_tensor_or_has_another_is_refused(
    model: Path, tmp_path: Path, change: Any, message: str
) -> None:
    made = WeightPublisher(make_context(model, tmp_path, transport="tests.support.transports:Draining"))
    named = list(weights(model))
    assert made.publish(1, named).num_bytes == sum(tensor.nbytes for _, tensor in named)
    with pytest.raises(SyncError, match=message):
        made.publish(2, change(named))
    made.close()


def test_an_engine_that_does_not_join_is_named_within_the_time_limit(model: Path, tmp_path: Path, silent: str) -> None:
    made = WeightPublisher(make_context(model, tmp_path, silent, timeout_s=3))
    started = time.monotonic()
    with pytest.raises(SyncError, match=f"did not form within sync.timeout_s=3; engines that did not join: {silent}"):
        made.connect()
    assert time.monotonic() - started < 15
    made.close()


@pytest.mark.parametrize("transport", ["disk", "tests.support.transports:Draining"])
def test_an_engine_that_does_not_answer_is_named_within_the_time_limit(
    model: Path, tmp_path: Path, silent: str, transport: str
) -> None:
    made = WeightPublisher(make_context(model, tmp_path, silent, transport=transport, timeout_s=1))
    made.connect()
    with pytest.raises(SyncError, match=f"engine {silent}/pause_generation: no answer within sync.timeout_s=1"):
        made.publish(1, weights(model))
    made.close()


def test_a_transport_that_cannot_be_imported_or_fails_is_named(model: Path, tmp_path: Path) -> None:
    for name, reason in (
        ("nowhere:X", "No module named 'nowhere'"),
        ("tests.support.transports:Missing", "has no attribute"),
    ):
        with pytest.raises(ConfigError, match=f"sync.transport='{name}' cannot be imported: .*{reason}"):
            WeightPublisher(make_context(model, tmp_path, transport=name))
    made = WeightPublisher(make_context(model, tmp_path, transport="tests.support.transports:Failing"))
    with pytest.raises(SyncError, match=r"sync\.transport=tests.support.transports:Failing: OSError: the link is down"):
        made.publish(1, iter([("t", torch.zeros(1))]))
    made.close()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"transport": "disc"}, "sync.transport='disc': write broadcast, disk, or module:Class"),
        ({"folder": "/x"}, "sync.folder='/x' is of sync.transport=disk"),
        ({"transport": "disk", "transport_args": {"x": 1}}, "sync.transport_args are of a module:Class"),
    ],
)
def test_options_of_another_transport_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SyncConfig(**values)
