"""The cases that the tests of this folder share."""

from __future__ import annotations

import pytest
from update_case import MODELS, Case, make_case


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """By model name."""
    root = tmp_path_factory.mktemp("update")
    return {name: make_case(root / name, arguments) for name, arguments in MODELS.items()}
