"""Load-balancing loss of mixture-of-experts models, off by default: ``train.moe_aux_loss_coeff``.

For one MoE layer and one micro-batch of ``T`` real tokens, ``E`` experts and top-k ``k``

    aux = E * sum_e f_e * P_e,    f_e = (tokens that choose e) / (T k),    P_e = (sum of e's softmax probability) / T

It is 1 at even load, and ``f`` carries no gradient. The update's loss gains ``coefficient`` times the sum over layers
of the mean of ``aux`` over micro-batches and DP ranks. So it depends on the micro-batch split, but not on how TP and CP
ranks share a micro-batch. Padding is left out; an empty micro-batch adds 0 and counts in the mean. With routing replay
``f`` counts the experts that the live router would choose, because the live router is to be balanced.

Scale: Megatron-Core gives ``aux`` the gradient ``CP / micro-batches`` (``MoEAuxLossAutoScaler``), its DDP averages over
DP x CP, and the parts of sequence-parallel ranks are summed. The factor of :mod:`megatron_fr.trainer.step` does not
reach this loss. Under full recomputation only the recomputed forward attaches it.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter

_NAME = "load_balancing_loss"


class BalancedRouter(TopKRouter):
    """Megatron-Core's router with a loss of 0, not 0 / 0, for a micro-batch without real tokens."""

    def _apply_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        coefficient = self.get_aux_loss_coeff("aux_loss")
        chosen, here, tokens = moe_utils.get_tokens_per_expert_and_token_count(
            routing_map, self.tp_cp_group, self.topk, with_padding_mask
        )
        loss = moe_utils.switch_load_balancing_loss_func(
            scores_for_aux_loss,
            chosen,
            torch.as_tensor(tokens).clamp(min=1),
            self.topk,
            self.config.num_moe_experts,
            coefficient,
        )
        attached: torch.Tensor = self.attach_and_log_load_balancing_loss(
            probs, coefficient, loss, _NAME, self.tp_cp_group, valid_token_count=here
        )
        return attached


def router_padding(chunk: Any, padding: torch.Tensor) -> torch.Tensor | None:
    """Padding that the routers of a DDP-wrapped ``chunk`` must leave out of the loss; None where the loss is off.

    ``padding`` is bool ``[r, c]`` of this rank's tokens, equal on all TP ranks. So is the result, but behind the first
    pipeline stage, where Megatron-Core does not cut it, it is ``[r, c / TP]``.
    """
    if not chunk.config.moe_aux_loss_coeff:
        return None
    if chunk.config.sequence_parallel and not chunk.module.pre_process:
        own: torch.Tensor = scatter_to_sequence_parallel_region(padding.t().contiguous()).t().contiguous()
        return own
    return padding


def reset_aux_loss() -> None:
    """Forget the recorded losses; call it before each update."""
    get_moe_metrics_tracker().clear()


def aux_loss_metrics(config: Any, num_micro_batches: int, device: torch.device) -> dict[str, float]:
    """Reduce ``train/moe_aux_loss`` of the last update: the mean over layers, micro-batches and DP ranks.

    A collective. Where the loss is off in the model's ``TransformerConfig``, it does nothing and there is no such
    metric. ``num_micro_batches`` is the number of each DP rank.
    """
    if not config.moe_aux_loss_coeff:
        return {}
    total = torch.zeros((), dtype=torch.float64, device=device)
    recorded = get_moe_metrics_tracker().metrics.get(_NAME)
    if recorded is not None:  # a pipeline stage may have no MoE layer
        total += recorded.values.double().sum()
    dist.all_reduce(total)  # TP, CP and DP ranks recorded the part of their tokens, pipeline stages their own layers
    every = config.moe_layer_freq
    layers = sum(every) if isinstance(every, list) else config.num_layers
    count = parallel_state.get_data_parallel_world_size() * num_micro_batches * layers
    return {"train/moe_aux_loss": float(total) / count}
