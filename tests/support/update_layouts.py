"""The layouts in which the update is compared, and which pairs of features meet in them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any

#: (scenario, parallel, train).
Layout = tuple[str, dict[str, Any], dict[str, Any]]

PACKED = {"max_tokens_per_micro_batch": 70}
ONE = {"micro_batch_size": 1}
TWO = {"micro_batch_size": 2}
ALL = {"micro_batch_size": 7}
FULL = {"recompute": "full"}
SELECTIVE = {"recompute": "selective"}
HEAD = {"logprob_mode": "recompute", "logprob_chunk_tokens": 16}
PLAIN = {"distributed_optimizer": False}
#: One more forward, with the live router, before the update.
CHECK = {"replay_check_every": 1}
VIRTUAL = {"pp": 2, "vpp": 2}
SEQUENCE = {"tp": 2, "sequence_parallel": True}

#: By number of processes; one set of them each.
LAYOUTS: dict[int, list[Layout]] = {
    1: [
        ("moe", {}, CHECK),
        ("moe", PLAIN, ONE | SELECTIVE),
        ("moe", {}, ALL | FULL),
        ("moe", {}, PACKED | FULL | CHECK),
        ("moe", {}, HEAD),
        ("moe", PLAIN, PACKED | SELECTIVE | HEAD),
        ("moe_live", {}, {"routing_replay": "record", **FULL, **CHECK}),
        ("glm", {}, CHECK),
        ("dense", PLAIN, PACKED | SELECTIVE),
        ("dense", {}, {}),
    ],
    2: [
        ("moe", {"tp": 2}, ONE | CHECK),
        ("moe", {"tp": 2, **PLAIN}, PACKED | FULL),
        ("moe", {"ep": 2, **PLAIN}, FULL | CHECK),
        ("moe", {}, ONE),
        ("moe", PLAIN, PACKED | CHECK),
        ("moe", {"pp": 2, **PLAIN}, FULL),
        ("moe", VIRTUAL, PACKED | FULL | CHECK),
        ("moe", {"cp": 2}, {}),
        ("moe", {"cp": 2, **PLAIN}, PACKED | FULL | CHECK),
        ("moe", {"tp": 2, "ep": 2, **PLAIN}, ALL | SELECTIVE | HEAD),
        ("moe", {"pp": 2, **PLAIN}, ONE | FULL | HEAD),
        ("moe", {"cp": 2, "ep": 2}, TWO | FULL | HEAD),
        ("moe", {"pp": 2}, ALL | HEAD),
        ("glm", {"tp": 2}, ONE | CHECK),
        ("glm", {"ep": 2, **PLAIN}, FULL | CHECK),
        ("glm", {"pp": 2}, PACKED | HEAD),
        ("glm", {"cp": 2}, PACKED),
        ("dense", {"tp": 2}, SELECTIVE),
        ("dense", SEQUENCE, PACKED),
        ("dense", {"cp": 2}, SELECTIVE | ALL),
        ("dense", VIRTUAL, ONE),
        ("dense", PLAIN, {}),
        ("dense", {**SEQUENCE, **PLAIN}, TWO | FULL | HEAD),
        ("dense", {"pp": 2, **PLAIN}, ALL | HEAD),
        ("dense", {}, ALL | FULL),
        ("dense", {"tp": 2, **PLAIN}, ALL | FULL),
        ("grpo", {"cp": 2}, {}),
        ("grpo", {"cp": 2}, PACKED),
        ("grpo", {"pp": 2}, TWO),
        ("grpo", {}, TWO),
        ("token", {"cp": 2}, {}),
        ("token", {}, TWO),
        ("own_loss", {}, TWO),
        ("own_loss", {"tp": 2}, PACKED),
        ("own_loss", {"cp": 2}, TWO),
        ("own_loss", {"cp": 2}, PACKED | FULL),
        ("own_loss", {"pp": 2}, ONE),
        ("truncated", {"cp": 2}, PACKED),
        ("truncated", {}, TWO),
    ],
    4: [
        ("moe", {"tp": 2, "ep": 2}, FULL | CHECK),
        ("moe", {"tp": 2, **VIRTUAL}, TWO | CHECK),
        ("moe", {"tp": 2, "cp": 2}, PACKED | FULL),
        ("moe", {"ep": 2, "cp": 2, **PLAIN}, {}),
        ("moe", {"pp": 2, "cp": 2}, SELECTIVE | CHECK),
        ("moe", {"cp": 2}, ONE),
        ("moe", {"tp": 2, **PLAIN}, {}),
        ("moe", {"pp": 2, "ep": 2}, PACKED | CHECK),
        ("moe", {"ep": 2, **VIRTUAL, **PLAIN}, TWO | SELECTIVE | HEAD),
        ("moe", {"cp": 2, "ep": 2, **VIRTUAL}, ONE | SELECTIVE | HEAD),
        ("moe", {"tp": 2, "pp": 2, "ep": 2}, TWO | HEAD),
        ("moe", {"cp": 2}, ALL | HEAD),
        ("glm", {"tp": 2, "ep": 2}, PACKED | FULL),
        ("dense", {"tp": 2, "cp": 2}, {}),
        ("dense", {"pp": 2}, TWO | SELECTIVE | HEAD),
        ("dense", {"tp": 2, "pp": 2, **PLAIN}, ONE | FULL | HEAD),
        ("dense", {"cp": 2, **VIRTUAL, **PLAIN}, PACKED | FULL | HEAD),
        ("dense", {**SEQUENCE, **VIRTUAL}, TWO | SELECTIVE),
        ("dense", {**SEQUENCE, "cp": 2, **PLAIN}, ONE | SELECTIVE),
        ("dense", {"pp": 2, "cp": 2, **PLAIN}, TWO),
        ("dense", {"tp": 2, **PLAIN}, PACKED | SELECTIVE),
        ("dense", {"cp": 2, **PLAIN}, ONE | SELECTIVE | HEAD),
        ("dense", SEQUENCE, ALL),
        ("dense", {"tp": 2, **VIRTUAL, **PLAIN}, TWO | FULL | HEAD),
        ("dense", {**SEQUENCE, "pp": 2}, PACKED),
        ("dense", VIRTUAL, ALL | FULL | HEAD),
        ("grpo", {"tp": 2, "cp": 2}, PACKED),
        ("own_loss", {"cp": 2}, TWO),
    ],
}

#: Large enough that the load-balancing loss's gradient is no smaller than the objective's: a factor of two cannot hide.
BALANCE_COEFFICIENT = 0.5
_ON = {"moe_aux_loss_coeff": BALANCE_COEFFICIENT}
#: Layouts in which the experts' load-balancing loss is on.
BALANCED: dict[int, list[Layout]] = {
    1: [("moe", {}, ALL | _ON), ("moe", PLAIN, TWO | FULL | _ON), ("moe", {}, PACKED | SELECTIVE | _ON)],
    2: [
        ("moe", {"tp": 2}, TWO | _ON),
        ("moe", {"tp": 2, "ep": 2}, PACKED | FULL | _ON),
        ("moe", {"ep": 2, **PLAIN}, TWO | HEAD | _ON),
        ("moe", {"cp": 2}, TWO | _ON),
        ("moe", {"cp": 2}, PACKED | FULL | _ON),
        ("moe", {}, ONE | _ON),  # four and three trajectories: one micro-batch is empty
        ("moe", {"pp": 2}, TWO | _ON),
        ("moe", VIRTUAL, PACKED | FULL | _ON),
    ],
    4: [
        ("moe", {"tp": 2, "pp": 2}, TWO | FULL | _ON),  # padding is cut behind the first stage too
        ("moe", {"tp": 2, "cp": 2, **PLAIN}, PACKED | _ON),
        ("moe", {"tp": 2, "ep": 2}, ONE | _ON),
        ("moe", {"cp": 2}, ONE | FULL | _ON),
        ("moe", {"cp": 2, "ep": 2, **VIRTUAL}, TWO | _ON),
    ],
}

#: What a layout chooses one of.
CHOICES: list[list[str]] = [
    ["TP", "SP"],
    ["PP", "VPP"],
    ["packed", "padded"],
    ["packed", "micro-batch 1", "micro-batch 2", "micro-batch all"],
    ["no recompute", "full recompute", "selective recompute"],
    ["distributed optimizer", "plain optimizer"],
    ["head kept", "head recomputed"],
]
#: Pairs that cannot be, beside two of one choice.
IMPOSSIBLE: dict[frozenset[str], str] = {
    frozenset({"VPP", "micro-batch all"}): "an interleaved schedule needs as many micro-batches as pipeline ranks",
}
#: Features that a model cannot have, with the reason.
WITHOUT = {
    "moe": {"TP": "Megatron-Core trains experts under TP only with sequence parallelism"},
    "dense": {"EP": "there are no experts"},
}


def features(world: int, layout: Layout) -> set[str]:
    """What takes part in a layout; ``SP`` is TP with sequence parallelism, ``TP`` without."""
    scenario, parallel, train = layout
    model_parallel = parallel.get("tp", 1) * parallel.get("pp", 1) * parallel.get("cp", 1)
    interleaved = parallel.get("vpp", 1) > 1
    packed = "max_tokens_per_micro_batch" in train
    size = None if packed else train.get("micro_batch_size")
    sequence = parallel.get("sequence_parallel", scenario != "dense")
    found = {
        "SP": parallel.get("tp", 1) > 1 and sequence,
        "TP": parallel.get("tp", 1) > 1 and not sequence,
        "EP": parallel.get("ep", 1) > 1,
        "PP": parallel.get("pp", 1) > 1 and not interleaved,
        "VPP": interleaved,
        "CP": parallel.get("cp", 1) > 1,
        "DP": world > model_parallel,
        "packed": packed,
        "padded": not packed,
        "micro-batch 1": size == 1,
        "micro-batch 2": size == 2,
        "micro-batch all": size == 7 and not interleaved,
        "no recompute": train.get("recompute", "off") == "off",
        "full recompute": train.get("recompute") == "full",
        "selective recompute": train.get("recompute") == "selective",
        "distributed optimizer": parallel.get("distributed_optimizer", True),
        "plain optimizer": not parallel.get("distributed_optimizer", True),
        "head kept": train.get("logprob_mode", "keep") == "keep",
        "head recomputed": train.get("logprob_mode") == "recompute",
    }
    return {name for name, there in found.items() if there}


def missing_pairs(model: str, layouts: Iterable[tuple[int, Layout]]) -> list[str]:
    """Pairs of features that meet in none of a model's layouts, though they could."""
    met = {
        frozenset(pair)
        for world, layout in layouts
        if layout[0] == model
        for pair in combinations(features(world, layout), 2)
    }
    names = {"SP", "TP", "EP", "CP", "DP"}.union(*CHOICES) - WITHOUT[model].keys()
    exclusive = {frozenset(pair) for choice in CHOICES for pair in combinations(choice, 2)}
    wanted = {frozenset(pair) for pair in combinations(names, 2)} - exclusive - IMPOSSIBLE.keys()
    return sorted(" with ".join(sorted(pair)) for pair in wanted - met)
