"""How the tests are shared out between processes (``pytest -n 2``)."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent
#: Files that share fixtures which take long to make: all of them belong to one process.
TOGETHER = {
    **dict.fromkeys(("parallel/test_update.py", "parallel/test_aux_loss.py"), "updates"),
    **dict.fromkeys(("rollout/test_session.py", "rollout/test_weight_push.py"), "engine"),
    **dict.fromkeys(("trainer/test_model.py", "trainer/test_model_gradients.py"), "tiny_models"),
    **dict.fromkeys(("main_job/test_train.py", "main_job/test_bad_input.py"), "policy"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests run in one process, in order."""
    for item in items:
        file = item.path.relative_to(ROOT).as_posix()
        item.add_marker(pytest.mark.xdist_group(TOGETHER.get(file, file)))
