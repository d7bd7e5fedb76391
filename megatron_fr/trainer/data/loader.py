"""Batches from the rollout service: rank 0 leases by metadata, each DP rank fetches its own payloads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_fr.algorithm import RewardBatch
from megatron_fr.config import RunConfig
from megatron_fr.errors import MegatronFRError, RolloutEnded
from megatron_fr.runtime.collectives import from_rank_zero, from_source, waiting_for
from megatron_fr.trainer.data.batch import MicroBatch, build_micro_batch
from megatron_fr.trainer.data.client import Lease, LeasedItem, RolloutClient
from megatron_fr.trainer.data.packing import assign_to_ranks, plan_micro_batches
from megatron_fr.trainer.objective import BatchConstants
from megatron_fr.trainer.policy import Policy
from megatron_fr.trajectory import Trajectory


class Shutdown(Exception):
    """Rank 0 was asked to stop; raised on every rank at the same place."""


@dataclass(frozen=True)
class Batch:
    """One update's data on one rank; all but ``micro_batches`` is equal on every rank."""

    lease: Lease
    constants: BatchConstants
    signal: bool
    micro_batches: list[MicroBatch]
    num_tokens: int  # of the whole batch
    wait_s: float


class BatchLoader:
    """Puts batches on ``device``; one per rank. ``stop`` is true on rank 0 once the run is asked to stop."""

    def __init__(
        self, config: RunConfig, policy: Policy, client: RolloutClient, device: torch.device, stop: object = None
    ) -> None:
        self._client, self._stop, self._batch_size = client, stop, config.train.batch_size
        self._objective = policy.step.objective
        self._plan: dict[str, Any] = {
            "micro_batch_size": config.train.micro_batch_size,
            "max_tokens": config.train.max_tokens_per_micro_batch,
            "multiple_of": config.parallel.pp if config.parallel.vpp > 1 else 1,
        }
        self._build: dict[str, Any] = {"route_shape": policy.route_shape, "layout": policy.layout, "device": device}

    def start(self, version: int) -> None:
        """See :meth:`RolloutClient.start`; a collective."""
        from_rank_zero(lambda: self._client.start(version))

    def lease(self, version: int) -> Batch:
        """Wait for the next batch, which will update ``version``, and build this rank's part; a collective.

        Raises:
            Shutdown: rank 0 was asked to stop.
            RolloutEnded: the service cannot go on.
            UpdateError: the user's own advantage function failed.
        """
        started = time.monotonic()
        lease: Lease | None = None
        with waiting_for(self._what_is_awaited):
            while lease is None:
                # In short attempts: a batch may take longer to generate than a collective of the other ranks may wait.
                stop, lease = from_rank_zero(lambda: self._attempt(version))
                if stop:
                    raise Shutdown
        wait_s = time.monotonic() - started
        items = lease.items
        rank = parallel_state.get_data_parallel_rank()
        shares = assign_to_ranks([i.num_tokens for i in items], parallel_state.get_data_parallel_world_size())
        advantages, signal = self._objective.advantages(_reward_batch(items))
        mine = shares[rank]
        trajectories = self._fetch([items[i].id for i in mine])
        parts = plan_micro_batches([[items[i].num_tokens for i in share] for share in shares], rank, **self._plan)
        return Batch(
            lease=lease,
            constants=BatchConstants(len(items), sum(i.num_action_tokens for i in items)),
            signal=signal,
            micro_batches=[
                build_micro_batch([trajectories[k] for k in part], [advantages[mine[k]] for k in part], **self._build)
                for part in parts
            ],
            num_tokens=sum(i.num_tokens for i in items),
            wait_s=wait_s,
        )

    def commit(self, batch: Batch, *, version: int, stepped: bool) -> None:
        """See :meth:`RolloutClient.commit`; a collective."""
        from_rank_zero(lambda: self._client.commit(batch.lease.batch_id, version=version, stepped=stepped))

    def probe_batch(self, trajectory: Trajectory) -> list[MicroBatch]:
        """Lay one trajectory out, the same on every DP rank; an interleaved pipeline gets more, empty micro-batches."""
        empty = [build_micro_batch([], [], **self._build) for _ in range(self._plan["multiple_of"] - 1)]
        return [build_micro_batch([trajectory], [0.0], **self._build), *empty]

    def _what_is_awaited(self) -> str:
        try:
            status = self._client.status()
        except MegatronFRError:  # :meth:`lease` says so
            return "the rollout service to answer"
        return (
            f"batch {status['consumed_batches'] + 1}: {status['queued']} of {self._batch_size} trajectories are "
            f"finished, {status['in_flight']} under way"
        )

    def _attempt(self, version: int) -> tuple[bool, Lease | None]:
        return (True, None) if self._stop else (False, self._client.lease(version, wait_s=1.0))

    def _fetch(self, ids: list[str]) -> list[Trajectory]:
        """The first rank of each model-parallel group asks for all; where one fails, every rank raises RolloutEnded."""
        source = parallel_state.get_model_parallel_src_rank()
        group = parallel_state.get_model_parallel_group(check_initialized=False)
        trajectories: list[Trajectory] = []
        failure = ""
        try:
            trajectories = from_source(lambda: self._client.fetch(ids), source, group)
        except MegatronFRError as error:
            failure = str(error)
        failures = [""] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        if reason := next(filter(None, failures), None):
            raise RolloutEnded(reason)
        return trajectories


def _reward_batch(items: Sequence[LeasedItem]) -> RewardBatch:
    return RewardBatch(
        rewards=torch.tensor([i.reward for i in items], dtype=torch.float64),
        group_ids=[i.group_id for i in items],
        action_tokens=torch.tensor([i.num_action_tokens for i in items]),
        lags=torch.tensor([i.lag for i in items]),
        metadata=[i.metadata for i in items],
        info=[i.info for i in items],
        reward_parts=[i.reward_parts for i in items],
    )
