"""Held-out evaluation: avg@k and pass@k of one or several sets of prompts, beside the training rollouts."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_fr.agents.contract import Prompt
from megatron_fr.config import RunConfig
from megatron_fr.errors import MegatronFRError, RolloutEnded
from megatron_fr.rollout.failures import ALL_FAILED, MAX_ATTEMPTS, worth_retrying
from megatron_fr.rollout.metrics import evaluation_metrics
from megatron_fr.rollout.prompts import load_prompts
from megatron_fr.rollout.session import EpisodeRunner
from megatron_fr.rollout.watchdog import report_stuck, waits_for
from megatron_fr.trajectory import Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOut:
    """One set of prompts and how it is sampled; the set of ``data.eval`` has the name ``""``."""

    name: str
    prompts: Sequence[Prompt]
    samples: int
    temperature: float | None  # None: the run's own


def load_held_out(config: RunConfig) -> list[HeldOut]:
    """The sets of a run, in the configuration's order; ConfigError where one's prompts cannot be read."""
    return [
        HeldOut(name, load_prompts(one.data, one.split)[: one.num_prompts], one.samples or 1, one.temperature)
        for name, one in config.evaluation_sets.items()
    ]


async def evaluate_sets(
    episodes: EpisodeRunner, sets: Sequence[HeldOut], *, concurrency: int, pass_threshold: float, name: str
) -> tuple[dict[str, float], int]:
    """:func:`evaluate` each set in turn; a named set's metrics have its name and a slash before theirs."""
    metrics: dict[str, float] = {}
    total = 0
    for held_out in sets:
        found, count = await evaluate(
            episodes, held_out, concurrency=concurrency, pass_threshold=pass_threshold, name=name
        )
        metrics |= {f"{held_out.name}/{key}" if held_out.name else key: value for key, value in found.items()}
        total += count
    return metrics, total


async def evaluate(
    episodes: EpisodeRunner, held_out: HeldOut, *, concurrency: int, pass_threshold: float, name: str
) -> tuple[dict[str, float], int]:
    """:func:`evaluation_metrics` of every prompt's samples, and the number of trajectories that were scored.

    These trajectories reach neither the queue nor the gate, so that none of them is trained on.

    Raises:
        RolloutEnded: the tool sandbox fails, no trajectory could be scored, or none of the first few prompts; carries
            the last failure.
    """
    slots = asyncio.Semaphore(concurrency)
    failures: list[str] = []
    played, given_up = set[str](), set[str]()  # prompt ids
    name = f"{name}-{held_out.name}" if held_out.name else name

    async def one(prompt: Prompt, identity: str) -> Trajectory | None:
        async with slots:
            for attempt in range(MAX_ATTEMPTS):
                try:
                    trajectory = await episodes.run(
                        prompt, trajectory_id=identity, group_id=identity, temperature=held_out.temperature
                    )
                    played.add(prompt.id)
                    return trajectory
                except RolloutEnded:
                    raise
                except Exception as error:  # an agent is the user's code; one bad rollout must not end the others
                    if not isinstance(error, MegatronFRError):
                        log.exception("trajectory %s: unexpected error in the agent", identity)
                    failures.append(f"{identity} (prompt {prompt.id!r}): {type(error).__name__}: {error}")
                    log.warning("evaluation failed at attempt %d: %s", attempt + 1, failures[-1])
                    if not worth_retrying(error):
                        break
        given_up.add(prompt.id)
        if not played and len(given_up) >= ALL_FAILED:
            raise RolloutEnded(f"evaluation {name!r}: the first {len(given_up)} prompts all failed; {failures[-1]}")
        return None

    tasks: list[list[asyncio.Task[Trajectory | None]]] = []

    def waiting() -> Counter[str]:
        return Counter(waits_for(task) for of_prompt in tasks for task in of_prompt if not task.done())

    watchdog = asyncio.create_task(
        report_stuck(lambda: -waiting().total(), waiting, what=f"trajectory of evaluation {name!r}")
    )
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [
                [group.create_task(one(prompt, f"eval-{name}-{number:05d}-{k}")) for k in range(held_out.samples)]
                for number, prompt in enumerate(held_out.prompts)
            ]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        watchdog.cancel()
    wanted = len(held_out.prompts) * held_out.samples
    scored = [[t for task in of_prompt if (t := task.result()) is not None] for of_prompt in tasks]
    if not any(scored):
        raise RolloutEnded(f"evaluation {name!r}: none of {wanted} trajectories could be scored; {failures[-1]}")
    count = sum(map(len, scored))
    metrics = evaluation_metrics([group for group in scored if group], pass_threshold)
    return metrics | {"trajectory/failed": float(wanted - count)}, count
