"""Held-out evaluation: avg@k and pass@k at the training temperature, beside the training rollouts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import numpy as np

from megatron_fr.agents.contract import Prompt
from megatron_fr.agents.rewards import FatalRewardError
from megatron_fr.errors import MegatronFRError, RolloutEnded
from megatron_fr.rollout.episode import EpisodeRunner
from megatron_fr.rollout.runner import MAX_ATTEMPTS
from megatron_fr.trajectory import Trajectory

log = logging.getLogger(__name__)

#: A trajectory passes with a reward above this; verifiers give 0 or 1.
PASS_ABOVE = 0.5


async def evaluate(
    episodes: EpisodeRunner, prompts: Sequence[Prompt], *, samples: int, concurrency: int, name: str
) -> tuple[dict[str, float], int]:
    """Roll every prompt out ``samples`` times.

    Trajectories of an evaluation reach neither the queue nor the gate.

    Returns:
        the metrics of :func:`summarise`, and the number of trajectories that were scored.

    Raises:
        RolloutEnded: no trajectory could be scored; carries the last failure.
        FatalRewardError: the reward function fails too often.
    """
    slots = asyncio.Semaphore(concurrency)
    failures: list[str] = []

    async def one(number: int, prompt: Prompt, sample: int) -> Trajectory | None:
        async with slots:
            for attempt in range(MAX_ATTEMPTS):
                identity = f"eval-{name}-{number:05d}-{sample}"
                try:
                    return await episodes.run(prompt, trajectory_id=identity, group_id=identity)
                except FatalRewardError:
                    raise
                except Exception as error:  # an agent is the user's code; one bad rollout must not end the others
                    if not isinstance(error, MegatronFRError):
                        log.exception("trajectory %s: unexpected error in the agent", identity)
                    failures.append(f"{identity} (prompt {prompt.id!r}): {type(error).__name__}: {error}")
                    log.warning("evaluation failed at attempt %d: %s", attempt + 1, failures[-1])
        return None

    jobs = [(number, prompt, sample) for number, prompt in enumerate(prompts) for sample in range(samples)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(*job)) for job in jobs]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    by_prompt: dict[int, list[Trajectory]] = {}
    for (number, _, _), task in zip(jobs, tasks, strict=True):
        if (trajectory := task.result()) is not None:
            by_prompt.setdefault(number, []).append(trajectory)
    if not by_prompt:
        raise RolloutEnded(f"evaluation {name!r}: none of {len(jobs)} trajectories could be scored; {failures[-1]}")
    metrics = summarise(list(by_prompt.values()))
    metrics["failed"] = float(len(jobs) - sum(map(len, by_prompt.values())))
    return metrics, sum(map(len, by_prompt.values()))


def summarise(by_prompt: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """Metrics of trajectories grouped by prompt (every group at least one).

    ``reward`` is avg@k: the mean over prompts of the mean reward. ``pass`` is pass@k: the share of prompts with at
    least one trajectory that passed. A named part of the reward is averaged over the trajectories that have it.
    """
    flat = [t for group in by_prompt for t in group]
    metrics = {
        "reward": float(np.mean([np.mean([t.reward for t in group]) for group in by_prompt])),
        "pass": float(np.mean([max(t.reward for t in group) > PASS_ABOVE for group in by_prompt])),
        "tool_calls": float(np.mean([t.num_tool_calls for t in flat])),
        "tool_errors": float(np.mean([t.num_tool_errors for t in flat])),
        "truncated": float(np.mean([t.finish_reason == "length" for t in flat])),
        "turns": float(np.mean([t.num_turns for t in flat])),
        "action_tokens": float(np.mean([t.num_action_tokens for t in flat])),
    }
    for part in sorted({name for t in flat for name in t.reward_parts} - set(metrics)):
        metrics[part] = float(np.mean([t.reward_parts[part] for t in flat if part in t.reward_parts]))
    return metrics
