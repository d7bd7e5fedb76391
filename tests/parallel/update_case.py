"""Tiny models with the scenario's batch and the reference's answer to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from update_reference import Reference, Update
from update_scenario import DELTA, FAILURE_QUANTILE, OPTIMIZER, SHAPES, TEMPERATURE, make_trajectories

from megatron_fr.tiny import make_untrained
from megatron_fr.trajectory import encode

#: Vocabulary 515 is odd, so that TP 2 needs a padding row; four layers make two virtual stages on two ranks.
#: ``moe_live`` has no routes to replay.
MODELS: dict[str, dict[str, Any]] = {
    "moe": {"family": "qwen3_moe", "num_layers": 4, "vocab_size": 515},
    "moe_live": {"family": "qwen3_moe", "num_layers": 4, "vocab_size": 515},
    "dense": {"family": "qwen2", "num_layers": 4, "vocab_size": 515},
}


@dataclass
class Case:
    """A model folder with ``batch.npz`` in it, and what one update on that batch must do."""

    folder: Path
    wanted: Update


def make_case(folder: Path, arguments: dict[str, Any]) -> Case:
    make_untrained(folder, **arguments)
    reference = Reference(folder)
    config = reference.model.config
    routes = None
    if folder.name == "moe":
        routes = (config.num_hidden_layers, config.num_experts_per_tok, config.num_experts)
    trajectories = make_trajectories(config.vocab_size, routes, lambda made: reference.logprobs(made, TEMPERATURE))
    (folder / "batch.npz").write_bytes(encode(trajectories))
    wanted = reference.update(
        trajectories,
        delta=DELTA,
        temperature=TEMPERATURE,
        failure_quantile=FAILURE_QUANTILE,
        optimizer=OPTIMIZER,
    )
    # The scenario is worth comparing: exactly the marked trajectory is rejected, and not by a hair.
    assert wanted.admitted == [special != "rejected" for *_, special in SHAPES]
    return Case(folder, wanted)
