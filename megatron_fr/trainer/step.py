"""One update: a single forward-backward over the batch through Megatron's schedule, then the optimizer.

Scale of the loss: Megatron's schedule multiplies a micro-batch's loss by CP and divides it by the number of
micro-batches; its DDP averages gradients over DP x CP. The objective is the plain sum over micro-batches, DP and CP
ranks. So the loss is multiplied by ``DP x micro-batches`` here, and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

from megatron_fr.errors import UpdateError
from megatron_fr.models.layers.aux_loss import aux_loss_metrics, reset_aux_loss, router_padding
from megatron_fr.trainer.data.batch import MicroBatch
from megatron_fr.trainer.logprob import LogprobSettings, head_logprobs
from megatron_fr.trainer.objective import BatchConstants, Objective
from megatron_fr.trainer.reduce import reduce_own_statistics, reduce_results
from megatron_fr.trainer.routing_replay import RoutingReplay

#: Of one rank's gradient in one buffer: squares of some hundred such norms can still be added in float32.
_LARGEST_NORM = 1e18
_OF_THE_LAST_STEP = ("policy/clipped", "policy/ratio_mean", "policy/ratio_max")


@dataclass(frozen=True)
class HeadTask:
    """Targets of one forward, equal on all ranks of a tensor-parallel group."""

    targets: torch.Tensor  # int64 [b, P], next token of each position
    wanted: torch.Tensor | None = None  # bool [b, P], positions that go through the head; the others give 0


@dataclass(frozen=True)
class LogprobHead:
    """An ``output_processor`` for ``GPTModel.forward``, with a :class:`HeadTask` as its context.

    Tied embeddings and DDP's hooks and buffers work as with Megatron's own output layer.
    """

    settings: LogprobSettings

    def __call__(
        self,
        *,
        hidden_states: torch.Tensor,  # [P, b, H], or this rank's [P / TP, b, H] under sequence parallelism
        output_layer: Any,
        output_weight: torch.Tensor | None,  # of a tied embedding; None without ties
        context: HeadTask,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities (differentiable) and entropy (without gradient), float32 ``[b, P]``."""
        weight = output_layer.weight if output_weight is None else output_weight
        group = self.settings.group
        if output_layer.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
        rows, positions = context.targets.shape
        hidden = hidden_states.reshape(positions * rows, -1)
        # The sequence is the first dimension of Megatron's hidden states.
        targets = context.targets.t().reshape(-1)
        where = None
        if context.wanted is not None:
            where = context.wanted.t().reshape(-1).nonzero().squeeze(1)
            hidden, targets = hidden[where], targets[where]
        if not output_layer.sequence_parallel and group is not None:
            # An identity whose backward sums the ranks' gradients.
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        logprobs, entropy = head_logprobs(hidden, weight, targets, self.settings)
        if where is not None:
            logprobs, entropy = (v.new_zeros(positions * rows).index_copy(0, where, v) for v in (logprobs, entropy))
        return logprobs.view(positions, rows).t(), entropy.view(positions, rows).t()


@dataclass(frozen=True)
class StepReport:
    """Result of one update, equal on every rank."""

    metrics: dict[str, float]
    forward_backward_s: float
    optimizer_s: float
    stepped: bool


@dataclass
class TrainStep:
    """Takes updates of the rank's DDP-wrapped model chunks."""

    chunks: Sequence[DistributedDataParallel]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    objective: Objective
    head: LogprobHead
    replay: RoutingReplay | None

    def update(
        self, batches: Sequence[MicroBatch], constants: BatchConstants, *, check_replay: bool = False
    ) -> StepReport:
        """Run forward and backward over this rank's micro-batches, on every rank equally many; then an optimizer step.

        Both as often as ``objective.steps`` says: ratios, clip and gradient norm are the last step's, other metrics the
        first one's. ``check_replay`` runs a forward with the live router first, where routes are replayed.

        Raises:
            UpdateError: a log-probability, ratio or gradient of some rank is not finite. Every rank raises it before
                that step changes weights and moments.
        """
        started = time.monotonic()
        live = self.logprobs(batches, live=True) if check_replay and batches[0].routes is not None else None
        if live is not None and self._device.type == "cuda":
            torch.cuda.synchronize()  # its time must not count as the training forward's
        replay_check_s = time.monotonic() - started
        metrics: dict[str, float] = {}
        forward_backward_s = optimizer_s = 0.0
        stepped = False
        for number in range(self.objective.steps):
            started = time.monotonic()
            found, logprobs = self._gradient(batches, constants, live if number == 0 else None)
            if number:
                metrics |= {name: found[name] for name in _OF_THE_LAST_STEP}
            else:
                metrics = found
                self.schedule.step(1)
                if logprobs:  # on the last pipeline stage
                    batches = [replace(batch, old_logprobs=old) for batch, old in zip(batches, logprobs, strict=True)]
            forward_backward_s += time.monotonic() - started
            if not found["trust_region/admitted_tokens"]:
                break  # The gradient is exactly zero, and Adam's momentum alone must not move the weights.
            started = time.monotonic()
            moved, grad_norm, _ = self.optimizer.step()
            stepped |= bool(moved)
            metrics["train/grad_norm"] = float(grad_norm or 0.0)
            metrics["train/lr"] = float(self.optimizer.param_groups[0]["lr"])
            optimizer_s += time.monotonic() - started
        if live is not None:
            metrics["time/replay_check"] = replay_check_s
        shown = {name: value for name, value in metrics.items() if name not in self.objective.without}
        return StepReport(shown, forward_backward_s, optimizer_s, stepped)

    def _gradient(
        self, batches: Sequence[MicroBatch], constants: BatchConstants, live: list[torch.Tensor] | None
    ) -> tuple[dict[str, float], list[torch.Tensor]]:
        """One forward and backward: its metrics, and each micro-batch's log-probabilities on the last stage."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        scale = parallel_state.get_data_parallel_world_size() * len(batches)
        loss = partial(self._training_loss, constants=constants, scale=scale)
        reset_aux_loss()
        results, routes = self._run(batches, loss, train=True)
        faults = self._faults(results)
        metrics = reduce_results(
            batches, results, faults, live=live, routes=routes, constants=constants, device=self._device
        )
        if self.objective.own:
            metrics |= reduce_own_statistics(results)
        metrics |= aux_loss_metrics(self.chunks[0].config, len(batches), self._device)
        return metrics, [result["logprobs"] for result in results]

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self.chunks[0].parameters()).device
        return device

    def skip(self) -> StepReport:
        """Consume a batch without signal: step the schedule, leave weights and moments."""
        self.schedule.step(1)
        return StepReport({}, 0.0, 0.0, stepped=False)

    @torch.no_grad()
    def logprobs(self, batches: Sequence[MicroBatch], *, live: bool = False) -> list[torch.Tensor]:
        """Log-probabilities float32 ``[r, c]`` of each micro-batch's targets; empty before the last pipeline stage.

        With ``live``, of action tokens alone, 0 elsewhere, and with the live router's experts.
        """
        return [r["logprobs"] for r in self._run(batches, _inference_loss, train=False, live=live)[0]]

    def _run(
        self, batches: Sequence[MicroBatch], loss: Callable[..., Any], *, train: bool, live: bool = False
    ) -> tuple[list[dict[str, Any]], tuple[float, float]]:
        """Run the schedule once: results of ``loss``, see :func:`reduce_results`, and :meth:`RoutingReplay.end`."""
        if self.replay is not None:
            self.replay.begin([None if live else b.routes for b in batches])
        for chunk in self.chunks:
            chunk.train(train)
        # An interleaved schedule goes through the batch once for each chunk.
        iterators = [iter(batches) for _ in self.chunks]
        try:
            results: list[dict[str, Any]] = get_forward_backward_func()(
                forward_step_func=partial(self._forward, loss=loss, actions_only=train or live),
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=list(self.chunks),
                num_microbatches=len(batches),
                seq_length=max(b.tokens.shape[1] for b in batches),
                micro_batch_size=max(len(b.tokens) for b in batches),
                forward_only=not train,
            )
        except BaseException:
            if self.replay is not None:
                self.replay.begin([])
            raise
        return results, self.replay.end() if self.replay is not None else (0.0, 0.0)

    def _forward(
        self, iterator: Iterator[MicroBatch], model: torch.nn.Module, *, loss: Callable[..., Any], actions_only: bool
    ) -> tuple[Any, Callable[[Any], Any]]:
        batch = next(iterator)
        # No mask: attention is causal, and padding stands at the end of a row.
        output = model(
            batch.tokens,
            batch.position_ids,
            None,
            packed_seq_params=batch.packed_seq_params,
            padding_mask=router_padding(model, batch.padding),
            output_processor=self.head,
            output_processor_context=HeadTask(batch.targets, batch.action_mask if actions_only else None),
        )
        return output, partial(loss, batch)

    def _training_loss(
        self, batch: MicroBatch, output: tuple[torch.Tensor, torch.Tensor], *, constants: BatchConstants, scale: int
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        logprobs, entropy = output
        try:
            loss, stats, own = self.objective.loss(batch, logprobs, entropy, constants)
        except (FloatingPointError, UpdateError) as error:
            # The other ranks are inside their schedules: finish with them, then fail together.
            return logprobs.sum() * 0, {"fault": str(error)}
        entropy_sum = torch.where(batch.action_mask, entropy, 0).double().sum()
        report = {"loss": loss.detach().double(), "entropy_sum": entropy_sum, "stats": stats, "own": own}
        return loss * scale, report | {"logprobs": logprobs.detach()}

    def _faults(self, results: Sequence[dict[str, Any]]) -> list[str]:
        faults = [result["fault"] for result in results if "fault" in result]
        buffers = [b for chunk in self.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        # Clipping by an infinite norm would zero the gradient, and weight decay alone would move the weights.
        norms = (torch.linalg.vector_norm(buffer.grad_data, dtype=torch.float32) for buffer in buffers)
        if not faults and not all(bool(norm < _LARGEST_NORM) for norm in norms):  # also NaN
            return ["a gradient is not finite, or its norm is not; check the weights, or lower optimizer.lr"]
        return faults


def _inference_loss(_batch: MicroBatch, output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, Any]:
    return output[0].new_zeros(()), {"logprobs": output[0]}
