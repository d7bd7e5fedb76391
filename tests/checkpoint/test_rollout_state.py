"""The rollout side of kill and resume, without engines: every prompt once, in whatever state the service was."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fr.config import RunConfig
from megatron_fr.errors import CheckpointError
from megatron_fr.rollout.cursor import PromptCursor
from megatron_fr.rollout.state import RolloutState, decode_state, encode_state, read_state
from tests.support.recorded import PROMPTS, Rollouts, seeded_delay


def config(group_size: int = 1, **changes: Any) -> RunConfig:
    algorithm = {"advantage": "group", "group_size": group_size} if group_size > 1 else {}
    values: dict[str, Any] = {
        "model": {"path": "unused"},
        "algorithm": algorithm,
        "train": {"num_updates": 10, "batch_size": 4},
        "rollout": {"max_concurrent_trajectories": 6, "max_context": 64, "max_new_tokens": 32, "max_policy_lag": 1},
        "reward": {"function": "unused:unused"},
        "data": {"train": "unused.jsonl"},
    }
    return RunConfig.model_validate(values | changes)


async def consume(rollouts: Rollouts, batches: int, used: list[tuple[str, str]]) -> None:
    """Lease and commit as a trainer does; ``used`` gets ``(prompt, group)`` of every trajectory."""
    for _ in range(batches):
        while (batch := rollouts.queue.lease(0)) is None:
            await asyncio.wait_for(rollouts.pool.wait_arrival(rollouts.pool.finished), 10)
        rollouts.training.commit(batch.batch_id)
        used += [(t.prompt_id, t.group_id) for t in batch.trajectories]


@pytest.mark.parametrize("group_size", [1, 2])
def test_over_kills_at_any_moment_each_prompt_is_used_exactly_once(group_size: int) -> None:
    run = config(group_size)

    async def lives() -> tuple[list[tuple[str, str]], RolloutState, int, int]:
        used: list[tuple[str, str]] = []
        saved: bytes | None = None
        kept: list[tuple[str, str]] = []
        under_way = waiting = 0
        for life in range(6):
            restored = decode_state(saved) if saved is not None else None
            failing = {f"{i:06d}" for i in range(life, 60, 7)} if group_size == 1 else set()
            rollouts = Rollouts(run, restored, delay=seeded_delay(life), fails=failing.__contains__)
            used = list(kept)
            rollouts.pool.start()
            await consume(rollouts, 2, used)
            rollouts.queue.lease(0)  # leased and not committed, as a trainer that is killed in its step leaves it
            await asyncio.sleep(0.002 * life)
            state = rollouts.take_state(0)
            saved, kept = encode_state(state), list(used)
            under_way += len(state.unfinished)
            waiting += len(state.ready) + len(state.partial)
            await consume(rollouts, 1, used)  # an update that is lost with the kill and repeated after it
            live = rollouts.gate.live
            assert live <= rollouts.gate.limit
            await rollouts.pool.stop()
        assert saved is not None
        return kept, decode_state(saved), under_way, waiting

    used, last, under_way, waiting = asyncio.run(lives())
    assert under_way > 0  # else this test shows nothing
    assert waiting > 0
    assert len(used) == 6 * 2 * 4
    assert set(Counter(group for _, group in used).values()) == {group_size}
    assert set(Counter(prompt for prompt, _ in used).values()) == {group_size}
    # Nothing is lost either: every prompt that the cursor has passed was used, waits, or will run again.
    known = {prompt for prompt, _ in used}
    known |= {t.prompt_id for t in (*last.ready, *last.partial)} | {u["prompt_id"] for u in last.unfinished}
    passed = PromptCursor(PROMPTS, run.seed, run.data.shuffle)
    assert known == {next(passed).id for _ in range(last.counters.cursor)}


def test_a_state_survives_its_encoding_and_a_damaged_one_is_one_error(tmp_path: Path) -> None:
    async def take() -> RolloutState:
        run = config(output=tmp_path)
        rollouts = Rollouts(run, delay=seeded_delay(0))
        rollouts.pool.start()
        await consume(rollouts, 1, [])
        rollouts.training.failed.failed(PROMPTS[0].id, "no answer")
        state = rollouts.take_state(3)
        await rollouts.pool.stop()
        rollouts = Rollouts(run, state)
        assert rollouts.training.failed.reasons == {PROMPTS[0].id: "no answer"}
        assert PROMPTS[0].id not in {next(rollouts.training.cursor).id for _ in range(2 * len(PROMPTS))}
        return state

    state = asyncio.run(take())
    again = decode_state(encode_state(state))
    assert (again.counters, again.prompts, again.failed) == (state.counters, state.prompts, state.failed)
    assert list(again.unfinished) == list(state.unfinished)
    assert [t.id for t in again.ready] == [t.id for t in state.ready]
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(again.ready, state.ready, strict=True))
    assert json.dumps(dict(again.prompts))
    path = tmp_path / "rollout.state"
    path.write_bytes(encode_state(state)[:-200])
    with pytest.raises(CheckpointError, match=r"rollout.state is damaged"):
        read_state(path)
    with pytest.raises(CheckpointError, match="No such file"):
        read_state(tmp_path / "missing")


def test_other_prompts_than_those_of_the_checkpoint_are_refused() -> None:
    async def restore() -> None:
        state = Rollouts(config()).take_state(0)
        Rollouts(config(seed=7), state)

    with pytest.raises(CheckpointError, match=r"other prompts \(seed: 0 then, 7 now\); restore data.train"):
        asyncio.run(restore())


@pytest.mark.parametrize("field", ["messages", "answer", "metadata"])
def test_prompts_of_the_same_ids_and_another_content_are_refused(tmp_path: Path, field: str) -> None:
    changed: dict[str, Any] = {"messages": ({"role": "user", "content": "?"},), "answer": 5, "metadata": {"a": 1}}
    others = [*PROMPTS[:-1], dataclasses.replace(PROMPTS[-1], **{field: changed[field]})]

    async def restore() -> None:
        state = Rollouts(config()).take_state(0)
        Rollouts(config(), state, prompts=list(PROMPTS))
        Rollouts(config(), state, prompts=others)

    with pytest.raises(CheckpointError, match=r"other prompts \(content: '\w{16}' then, '\w{16}' now\)"):
        asyncio.run(restore())
