"""The cases that the tests of this folder share."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.support.parallel_launch import run_ranks
from tests.support.update_case import Case, make_case
from tests.support.update_layouts import BALANCED, LAYOUTS, Layout
from tests.support.update_ranks import Answers, Job, joined_update, run_updates
from tests.support.update_reference import Update
from tests.support.update_scenario import SCENARIOS

PLAIN_UPDATES: dict[int, list[Layout]] = {
    1: [(name, {}, {"micro_batch_size": len(scenario.shapes)}) for name, scenario in SCENARIOS.items()]
}


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """By the scenario's name."""
    root = tmp_path_factory.mktemp("update")
    return {name: make_case(root / name, name) for name in SCENARIOS}


@pytest.fixture(scope="session")
def answers(cases: dict[str, Case]) -> Answers:
    """Runs all updates of one number of processes, in one set of them, when first asked."""

    @cache
    def run(world: int) -> dict[str, list[list[dict[str, Any]]]]:
        layouts = {"compared": LAYOUTS[world], "balanced": BALANCED[world], "plain": PLAIN_UPDATES.get(world, [])}
        jobs = [
            Job(cases[scenario].folder, {"world_size": world, **parallel}, train)
            for group in layouts.values()
            for scenario, parallel, train in group
        ]
        by_job = zip(*run_ranks(run_updates, world, jobs=jobs, timeout_s=600), strict=True)
        return {name: [list(next(by_job)) for _ in group] for name, group in layouts.items()}

    return run


@pytest.fixture(scope="session")
def one_process(answers: Answers) -> dict[str, Update]:
    """Each scenario's update in one process: no parallelism, one padded forward of the batch, nothing recomputed."""
    found = zip(PLAIN_UPDATES[1], answers(1)["plain"], strict=True)
    return {scenario: joined_update(ranks) for (scenario, _, _), ranks in found}
