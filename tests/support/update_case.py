"""Tiny models with the scenarios' batches and the reference's answers to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_fr.trajectory import Trajectory, encode
from tests.support.update_reference import Reference, Update
from tests.support.update_scenario import OPTIMIZER, SCENARIOS, TEMPERATURE, make_trajectories
from tools.tiny import make_untrained


@dataclass
class Case:
    """A model folder with ``batch.npz`` in it, and what one update on that batch must do."""

    folder: Path
    trajectories: list[Trajectory]
    wanted: Update


def make_case(folder: Path, name: str) -> Case:
    scenario = SCENARIOS[name]
    make_untrained(folder, **scenario.model)
    reference = Reference(folder)
    config = reference.model.config
    routes = None
    if scenario.replay:
        routes = (len(reference.gates), config.num_experts_per_tok, config.num_local_experts)
    trajectories = make_trajectories(
        scenario, config.vocab_size, routes, lambda made: reference.logprobs(made, TEMPERATURE)
    )
    (folder / "batch.npz").write_bytes(encode(trajectories))
    wanted = reference.update(trajectories, algorithm=scenario.algorithm, temperature=TEMPERATURE, optimizer=OPTIMIZER)
    if scenario.algorithm.get("admission", "sequence") == "sequence" and scenario.algorithm["name"] != "grpo":
        # The scenario is worth comparing: exactly the marked trajectory is rejected, and not by a hair.
        admitted = [wanted.decisions[t.num_action_tokens].admitted for t in trajectories]
        assert admitted == [special != "rejected" for *_, special in scenario.shapes]
    return Case(folder, trajectories, wanted)
