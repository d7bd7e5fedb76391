"""``megatron-fr plan``: memory of each GPU in each layout, without a GPU and without reading weights.

Parameters are counted exactly, from the weight tables. Gradients are float32 buffers. AdamW keeps two float32 moments,
and a float32 copy of bfloat16 weights; the distributed optimizer shards them. Activations, head and batch are estimates
for full-length trajectories. A rank fits when the sum takes at most nine tenths of its memory.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from pydantic import ValidationError

from megatron_fr.config import RunConfig
from megatron_fr.config.sections import ParallelConfig
from megatron_fr.errors import ConfigError
from megatron_fr.hf.export import hf_tensor_specs
from megatron_fr.hf.folder import read_spec
from megatron_fr.models.layouts import check_aux_loss, check_layout, uses_sequence_parallel
from megatron_fr.models.mappings import Buffer, Sizes, WeightMapping
from megatron_fr.models.spec import EMBEDDING, FINAL_NORM, HEAD, ModelSpec
from megatron_fr.trainer.data.packing import plan_micro_batches
from megatron_fr.trajectory import route_dtype

USABLE = 0.9
#: Elements of the head's float32 scratch on a GPU (``trainer/logprob.py``).
SCRATCH = 1 << 25
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class RankMemory(NamedTuple):
    """The most loaded rank of a layout: number of parameters, and bytes in the order of the table's columns."""

    parallel: ParallelConfig
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    head: int
    batch: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.head + self.batch


def count_parameters(spec: ModelSpec, parallel: ParallelConfig, stage: int) -> tuple[int, int]:
    """Count the parameters of a rank of a pipeline stage, with vocabulary padding: ``(all but experts, experts)``."""

    def size(mapping: WeightMapping) -> int:
        if isinstance(mapping, Buffer):
            return 0
        meta = [torch.empty(shape, device="meta") for shape in mapping.hf_shapes(spec)]
        return mapping.shard(meta, spec, 0, parallel.etp if mapping.per_expert else parallel.tp).numel()

    dense = experts = 0
    layers = stage_layers(spec, parallel, stage)
    moe = sum(layer in spec.moe_layers for layer in layers)
    for count, mlp in ((len(layers) - moe, spec.dense_mlp), (moe, spec.moe_mlp)):
        for mapping in spec.attention + mlp:
            if mapping.per_expert:
                experts += count * size(mapping) * spec.experts // parallel.ep
            else:
                dense += count * size(mapping)
    first, last = stage == 0, stage == parallel.pp - 1
    if first or (last and spec.tie):  # the last stage has a copy of a tied embedding
        dense += size(EMBEDDING)
    if last:
        dense += size(FINAL_NORM) + (0 if spec.tie else size(HEAD))
    return dense, experts


def stage_layers(sizes: Sizes, parallel: ParallelConfig, stage: int) -> list[int]:
    """List the layers, from 0, of a pipeline stage; with virtual stages the stages take turns."""
    each = sizes.layers // (parallel.pp * parallel.vpp)
    return [layer for layer in range(sizes.layers) if layer // each % parallel.pp == stage]


def rank_memory(spec: ModelSpec, config: RunConfig, parallel: ParallelConfig) -> RankMemory:
    """Compute the memory of the most loaded rank in one layout."""
    width = _DTYPE_BYTES[config.model.dtype]
    state = 12 if config.model.dtype == "bfloat16" else 8
    shards = parallel.dp * parallel.cp, parallel.world_size // (parallel.ep * parallel.etp * parallel.pp)
    dense_shard, expert_shard = shards if parallel.distributed_optimizer else (1, 1)
    stages = []
    for stage in range(parallel.pp):
        dense, experts = count_parameters(spec, parallel, stage)
        total, optimizer = dense + experts, (-(-dense // dense_shard) + -(-experts // expert_shard)) * state
        activations, batch = (count(spec, config, parallel, stage) for count in (activation_bytes, batch_bytes))
        head = head_bytes(spec, config, parallel) if stage == parallel.pp - 1 else 0
        stages.append(RankMemory(parallel, total, total * width, total * 4, optimizer, activations, head, batch))
    return max(stages, key=lambda memory: memory.total)


def activation_bytes(spec: ModelSpec, config: RunConfig, parallel: ParallelConfig, stage: int) -> int:
    """Bytes that the layers of a pipeline stage keep for their backward.

    For each token a layer keeps, in the model's dtype: projected and rotated queries, keys and values, normalised
    queries, the attention's output, inputs and outputs of two norms, and gate, up and product of its MLP. A MoE layer
    keeps the token's copy and these three for each of ``top_k`` experts; experts get equally many tokens, and ETP ranks
    all tokens of their group. TP divides what lies between its matrices, sequence parallelism the rest. One layer at a
    time also has gradients of its MLP's product and output.

    Stage ``s`` of ``PP`` has ``PP - s`` micro-batches in flight. The interleaved schedule has
    ``2 (PP - 1 - s) + (VPP - 1) PP + 1`` of one ``VPP``-th of its layers. With ``recompute=full`` those in flight keep
    only each layer's input, and one layer at a time is whole.
    """
    width = _DTYPE_BYTES[config.model.dtype]
    number, _, tokens = _micro_batches(config, parallel)
    sequence = parallel.tp if uses_sequence_parallel(spec, parallel) else 1
    layers = stage_layers(spec, parallel, stage)
    each, moe = len(layers), sum(layer in spec.moe_layers for layer in layers)
    queries = 4 if spec.qk_norm else 3
    attention = (spec.q_size * queries + spec.kv_size * 3) / parallel.tp + 4 * spec.hidden / sequence
    copy, inner = spec.hidden / sequence, spec.ffn / parallel.tp
    dense, dense_work = attention + 3 * inner, inner + copy
    copies, inner = spec.top_k * copy * parallel.etp, spec.top_k * spec.moe_ffn / sequence
    shared = spec.shared_ffn / parallel.tp
    routed, routed_work = attention + copies + 3 * (inner + shared), inner + copies + shared
    work = max(dense_work if moe < each else 0, routed_work if moe else 0)
    virtual = parallel.vpp
    interleaved = 2 * (parallel.pp - 1 - stage) + (virtual - 1) * parallel.pp + 1
    in_flight = min(interleaved if virtual > 1 else parallel.pp - stage, number * virtual) / virtual
    if config.train.recompute == "full":
        one_layer = max(dense if moe < each else 0, routed if moe else 0)
        per_token = each * spec.hidden / sequence * in_flight + one_layer + work
    else:
        per_token = ((each - moe) * dense + moe * routed) * in_flight + work
    return int(per_token * (tokens // parallel.cp) * width)


def head_bytes(spec: ModelSpec, config: RunConfig, parallel: ParallelConfig) -> int:
    """Bytes that the head holds at its peak, in its backward, on a rank of the last pipeline stage.

    ``N`` action tokens of one micro-batch go through the head, at most ``max_new_tokens`` of each trajectory. With
    ``W`` rows of the padded vocabulary on this rank, it holds logits ``[N, W]`` (of ``logprob_chunk_tokens`` tokens
    with ``recompute``), the hidden states and their gradient (float32 with ``recompute``), the weight's gradient, and
    a float32 scratch.
    """
    width = _DTYPE_BYTES[config.model.dtype]
    _, trajectories, tokens = _micro_batches(config, parallel)
    actions = min(trajectories * config.rollout.max_new_tokens, tokens // parallel.cp)
    rows = spec.padded_vocab(parallel.tp) // parallel.tp
    keep = config.train.logprob_mode == "keep"
    logits = (actions if keep else min(actions, config.train.logprob_chunk_tokens)) * rows
    hidden = actions * spec.hidden * (2 * width if keep else width + 4)
    return logits * width + hidden + rows * spec.hidden * width + min(logits, SCRATCH) * 4


def batch_bytes(spec: ModelSpec, config: RunConfig, parallel: ParallelConfig, stage: int) -> int:
    """Bytes of an update's full-length trajectories on one rank of a pipeline stage.

    For each token: ids, targets and positions in int64, masks, log-probabilities and versions. Routing replay adds the
    experts of the stage's layers, a byte each up to 256 experts.
    """
    tokens = _share(config, parallel) * config.rollout.max_context // parallel.cp
    token = 3 * 8 + 2 * 1 + 2 * 4
    if config.train.max_tokens_per_micro_batch is not None:
        token += 8 + 1  # where each trajectory's tokens are
    routes = 0
    if config.train.routing_replay == "rollout" and spec.moe:
        layers = len(set(spec.moe_layers) & set(stage_layers(spec, parallel, stage)))
        routes = route_dtype(spec.experts).itemsize * layers * spec.top_k + 2 * 1
    sequence = parallel.tp if uses_sequence_parallel(spec, parallel) else 1
    return tokens * token + tokens // sequence * routes


def _micro_batches(config: RunConfig, parallel: ParallelConfig) -> tuple[int, int, int]:
    """Largest number of micro-batches of a rank, and of trajectories and tokens (over all CP ranks) in one of them."""
    train, longest, share = config.train, config.rollout.max_context, _share(config, parallel)
    if (packed := train.max_tokens_per_micro_batch) is not None:  # each holds at least one trajectory, of any length
        return share, share, min(max(longest, packed), share * longest)
    groups = plan_micro_batches(
        [[longest] * share], 0, micro_batch_size=train.micro_batch_size, max_tokens=None,
        multiple_of=parallel.pp if parallel.vpp > 1 else 1,
    )  # fmt: skip
    rows = max(map(len, groups))
    return len(groups), rows, rows * longest


def _share(config: RunConfig, parallel: ParallelConfig) -> int:
    """Largest number of trajectories on one data-parallel rank."""
    return -(-config.train.batch_size // parallel.dp)


def legal_layouts(spec: ModelSpec, config: RunConfig, world_size: int) -> list[ParallelConfig]:
    """List every TP, EP, PP and CP that the trainer accepts on ``world_size`` ranks; other fields stay as they are.

    Raises:
        ConfigError: there is no such layout; the message says why the layout without parallelism is refused.
    """
    sizes = [n for n in range(1, world_size + 1) if world_size % n == 0]
    found, refusals = [], []
    for tp, pp, cp, ep in itertools.product(sizes, repeat=4):
        changes = {"world_size": world_size, "tp": tp, "pp": pp, "cp": cp, "ep": ep}
        try:
            parallel = ParallelConfig.model_validate(config.parallel.model_dump() | changes)
            check_layout(spec, parallel)
            RunConfig.model_validate(dict(config) | {"parallel": parallel})
            found.append(parallel)
        except ValidationError as error:
            refusals.append(error.errors()[0]["msg"].removeprefix("Value error, "))
        except ConfigError as error:
            refusals.append(str(error))
    if not found:
        reason = f"with none above 1: {refusals[0]}" if refusals else "give at least 1"
        raise ConfigError(f"--gpus {world_size}: no TP, EP, PP and CP suit the model and the configuration; {reason}")
    return found


def render(config: RunConfig, gpus: int | None, gpu_memory_gb: float) -> str:
    """Make the table for every legal layout on ``gpus`` trainer GPUs; None lists only the configuration's own.

    Raises:
        ConfigError: the trainer refuses the layout, or no layout is legal.
        ModelError: the model folder cannot be read, or the trainer cannot build the model.
    """
    spec = read_spec(config.model.path)
    check_aux_loss(spec, config.train.moe_aux_loss_coeff)
    if gpus is None:
        check_layout(spec, config.parallel)
    layouts = [config.parallel] if gpus is None else legal_layouts(spec, config, gpus)
    width, dtype = _DTYPE_BYTES[config.model.dtype], getattr(torch, config.model.dtype)
    sync = sum(tensor.num_bytes for tensor in hf_tensor_specs(spec, dtype))
    token = 2 * spec.layers * spec.kv_size * width // min(config.rollout.engine_tp, spec.kv_heads)
    contexts = -(-config.rollout.max_concurrent_trajectories // config.rollout.engines) * config.rollout.max_context
    engine_weights = sync / config.rollout.engine_tp
    usable = gpu_memory_gb * USABLE * 1e9
    fits = engine_weights + token * contexts <= usable
    engine = "fits" if fits else "does not fit at once; runners will wait for room"
    if engine_weights + token * config.rollout.max_context > usable:
        engine = "weights and one trajectory do not fit; raise rollout.engine_tp"
    lines = [
        f"{spec.architecture}: {sync // width:,} parameters, {config.model.dtype}",
        f"weight sync: {sync / 1e9:.2f} GB an update to each engine",
        f"engine GPU: weights {engine_weights / 1e9:.2f} GB, KV cache {token:,} bytes a token, "
        f"{token * contexts / 1e9:.2f} GB for all runners at full length: {engine}",
        "trainer GPU, GB:",
        "  TP  EP  PP  CP  DP      parameters   weights  gradients  optimizer  activations    head   batch   total"
        "  fits",
    ]
    found = sorted((rank_memory(spec, config, layout) for layout in layouts), key=lambda memory: memory.total)
    for memory in found:
        p = memory.parallel
        columns = zip((*memory[2:], memory.total), (10, 11, 11, 13, 8, 8, 8), strict=True)
        gb = "".join(f"{part / 1e9:{width}.2f}" for part, width in columns)
        fit = "yes" if memory.total <= usable else "no"
        lines.append(f"{p.tp:4}{p.ep:4}{p.pp:4}{p.cp:4}{p.dp:4}{memory.parameters:16,}{gb}  {fit}")
    return "\n".join(lines)
