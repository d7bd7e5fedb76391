"""Fixtures of the agent tests."""

from __future__ import annotations

from typing import Any

import pytest

from tools.tiny import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()
