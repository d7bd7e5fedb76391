"""An untrained tiny model with prompts: the main job's mechanics do not need a good policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.tiny import make_untrained


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "model"
    make_untrained(folder)
    lines = [
        {"id": str(i), "prompt": f"Compute {i} * 3, then add 1 to the result.", "answer": 3 * i + 1} for i in range(64)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
