"""What a model needs on each GPU in each layout: ``megatron-fr plan``. Needs no GPU, and reads no weights.

Parameters are counted exactly, from the bridge's tables. Gradients are float32 buffers of the same size. AdamW keeps
two float32 moments, and beside bfloat16 weights a float32 copy, sharded over data-parallel ranks by the distributed
optimizer. Activations, the head and the batch are estimates, of full-length trajectories: :func:`activation_bytes`,
:func:`head_bytes` and :func:`batch_bytes` say of what. A rank fits when nine tenths of its memory hold the sum, which
leaves room for communication buffers and fragmentation.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from pydantic import ValidationError

from megatron_fr.config import RunConfig
from megatron_fr.config.sections import ParallelConfig
from megatron_fr.errors import ConfigError
from megatron_fr.hf.export import hf_tensor_specs
from megatron_fr.hf.folder import read_spec
from megatron_fr.models.layouts import check_aux_loss, check_layout, uses_sequence_parallel
from megatron_fr.models.mappings import Buffer, WeightMapping
from megatron_fr.models.sizes import Sizes
from megatron_fr.models.spec import EMBEDDING, FINAL_NORM, HEAD, ModelSpec
from megatron_fr.trainer.data.packing import plan_micro_batches
from megatron_fr.trajectory import route_dtype

USABLE = 0.9
#: Elements of the head's float32 scratch on a GPU (``trainer/logprob.py``).
SCRATCH = 1 << 25
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class RankMemory:
    """Of the most loaded rank; parameters as counts, everything else in bytes.

    Attributes:
        weights: in the model's dtype.
        gradients: DDP's buffer, float32.
        optimizer: this rank's share of Adam's moments and of the float32 copy.
        activations: :func:`activation_bytes`.
        head: :func:`head_bytes`; 0 on all pipeline stages but the last.
        batch: :func:`batch_bytes`.
    """

    parallel: ParallelConfig
    dense_parameters: int
    expert_parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    head: int
    batch: int

    @property
    def total(self) -> int:
        """Bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.head + self.batch


def count_parameters(spec: ModelSpec, parallel: ParallelConfig, stage: int) -> tuple[int, int]:
    """Parameters of a rank of pipeline stage ``stage``: ``(all but experts, experts)``, vocabulary padding included."""

    def size(mapping: WeightMapping) -> int:
        ranks = parallel.etp if mapping.per_expert else parallel.tp
        if isinstance(mapping, Buffer):
            return 0
        meta = [torch.empty(shape, device="meta") for shape in mapping.hf_shapes(spec)]
        return mapping.shard(meta, spec, 0, ranks).numel()

    kinds = {}
    for moe, mlp in ((False, spec.dense_mlp), (True, spec.moe_mlp)):
        weights = spec.attention + mlp
        experts = sum(size(mapping) for mapping in weights if mapping.per_expert) * spec.experts // parallel.ep
        kinds[moe] = sum(size(mapping) for mapping in weights if not mapping.per_expert), experts
    layers = [kinds[layer in spec.moe_layers] for layer in stage_layers(spec, parallel, stage)]
    dense, experts = sum(layer[0] for layer in layers), sum(layer[1] for layer in layers)

    first, last = stage == 0, stage == parallel.pp - 1
    if first:
        dense += size(EMBEDDING)
    if last:
        dense += size(FINAL_NORM)
        if not spec.tie:
            dense += size(HEAD)
        elif not first:  # a copy of the embedding that is the head, too
            dense += size(EMBEDDING)
    return dense, experts


def stage_layers(sizes: Sizes, parallel: ParallelConfig, stage: int) -> list[int]:
    """The layers, from 0, of pipeline stage ``stage``: stages take turns, once for each virtual one."""
    each = sizes.layers // (parallel.pp * parallel.vpp)
    return [layer for layer in range(sizes.layers) if layer // each % parallel.pp == stage]


def rank_memory(spec: ModelSpec, config: RunConfig, parallel: ParallelConfig) -> RankMemory:
    """The memory of the most loaded rank in one layout."""
    width = _DTYPE_BYTES[config.model.dtype]
    state = 12 if config.model.dtype == "bfloat16" else 8
    shard = parallel.dp * parallel.cp if parallel.distributed_optimizer else 1
    expert_data = parallel.world_size // (parallel.ep * parallel.etp * parallel.pp)
    expert_shard = expert_data if parallel.distributed_optimizer else 1
    stages = []
    for stage in range(parallel.pp):
        dense, experts = count_parameters(spec, parallel, stage)
        stages.append(
            RankMemory(
                parallel=parallel,
                dense_parameters=dense,
                expert_parameters=experts,
                weights=(dense + experts) * width,
                gradients=(dense + experts) * 4,
                optimizer=-(-dense // shard) * state + -(-experts // expert_shard) * state,
                activations=activation_bytes(spec, config, parallel, stage),
                head=head_bytes(spec, config, parallel) if stage == parallel.pp - 1 else 0,
                batch=batch_bytes(spec, config, parallel, stage),
            )
        )
    return max(stages, key=lambda memory: memory.total)


def activation_bytes(spec: ModelSpec, config: RunConfig, parallel: ParallelConfig, stage: int) -> int:
    """What the layers of pipeline stage ``stage`` keep for their backward, in bytes.

    A layer keeps, in the model's dtype, for each token of a micro-batch: the output of the projection to queries, keys
    and values, rotated queries and keys, the attention's output, and the queries once more where they are normalised;
    four tensors of the hidden size (two norms' inputs and outputs); gate, up and their product of a dense MLP, or for
    each of the ``top_k`` experts the token's copy and these three. Experts are taken to get equally many tokens; where
    they are split over ``expert_tensor`` ranks, each of these gets the tokens of all. Flash attention keeps no scores.
    TP divides what lies between its pairs of matrices; sequence parallelism divides the rest, too. One layer at a time
    is in its backward, which has the gradients of its MLP's product and output besides.

    Of the micro-batches, stage ``s`` of ``PP`` has ``PP - s`` in flight under 1F1B; the interleaved schedule has
    ``2 (PP - 1 - s) + (VPP - 1) PP + 1`` of one ``VPP``-th of the stage's layers; never more than there are. With
    ``recompute=full`` those in flight keep only each layer's input, and one layer at a time is whole.
    """
    width = _DTYPE_BYTES[config.model.dtype]
    batches = _micro_batches(config, parallel)
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
    chunks = parallel.pp - stage
    if virtual > 1:
        chunks = 2 * (parallel.pp - 1 - stage) + (virtual - 1) * parallel.pp + 1
    in_flight = min(chunks, batches.number * virtual) / virtual
    if config.train.recompute == "full":
        one_layer = max(dense if moe < each else 0, routed if moe else 0)
        per_token = each * spec.hidden / sequence * in_flight + one_layer + work
    else:
        per_token = ((each - moe) * dense + moe * routed) * in_flight + work
    return int(per_token * (batches.tokens // parallel.cp) * width)


def head_bytes(spec: ModelSpec, config: RunConfig, parallel: ParallelConfig) -> int:
    """What the head holds at its peak, in its backward, on a rank of the last pipeline stage; in bytes.

    Only action tokens go through the head, ``N`` of them: at most ``max_new_tokens`` of each trajectory, which in the
    worst case is all tokens of a packed micro-batch; under CP the rank that holds most of them. With
    ``W`` rows of the vocabulary here (padded vocabulary / TP), in the model's dtype:

    - ``logprob_mode=keep``: logits ``[N, W]``; the backward writes their gradient over them;
    - ``recompute``: logits of ``logprob_chunk_tokens`` tokens, a buffer that the backward uses in blocks of its size;
    - in both the hidden states ``[N, H]`` and their gradient (float32 when recomputed), and the weight's gradient
      ``[W, H]`` before it is added to the float32 buffer;
    - a float32 scratch of at most 2^25 elements.

    One micro-batch: the last stage runs a micro-batch's backward right after its forward.
    """
    width = _DTYPE_BYTES[config.model.dtype]
    batches = _micro_batches(config, parallel)
    actions = min(batches.rows * config.rollout.max_new_tokens, batches.tokens // parallel.cp)
    rows = spec.padded_vocab(parallel.tp) // parallel.tp
    keep = config.train.logprob_mode == "keep"
    logits = (actions if keep else min(actions, config.train.logprob_chunk_tokens)) * rows
    hidden = actions * spec.hidden * (2 * width if keep else width + 4)
    return logits * width + hidden + rows * spec.hidden * width + min(logits, SCRATCH) * 4


def batch_bytes(spec: ModelSpec, config: RunConfig, parallel: ParallelConfig, stage: int) -> int:
    """An update's trajectories on one rank of pipeline stage ``stage``, all of full length; in bytes.

    They are on the device for the whole update: ids, targets and positions in int64, masks, log-probabilities and
    versions, and for routing replay each token's experts in the stage's layers, a byte each up to 256 experts.
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


@dataclass(frozen=True)
class _MicroBatches:
    """Of one rank in an update of full-length trajectories.

    Attributes:
        number: of micro-batches, at most.
        rows: trajectories in each, at most.
        tokens: in each, at most; over all CP ranks.
    """

    number: int
    rows: int
    tokens: int


def _micro_batches(config: RunConfig, parallel: ParallelConfig) -> _MicroBatches:
    longest, packed, share = (
        config.rollout.max_context,
        config.train.max_tokens_per_micro_batch,
        _share(config, parallel),
    )
    if packed is not None:
        # Each holds at least one trajectory, of any length.
        return _MicroBatches(share, share, min(max(longest, packed), share * longest))
    parts = plan_micro_batches(
        [[longest] * share],
        0,
        micro_batch_size=config.train.micro_batch_size,
        max_tokens=None,
        multiple_of=parallel.pp if parallel.vpp > 1 else 1,
    )
    rows = max(len(part) for part in parts)
    return _MicroBatches(len(parts), rows, rows * longest)


def _share(config: RunConfig, parallel: ParallelConfig) -> int:
    """Trajectories of one data-parallel rank, at most."""
    return -(-config.train.batch_size // parallel.dp)


def legal_layouts(spec: ModelSpec, config: RunConfig, world_size: int) -> list[ParallelConfig]:
    """Every TP, EP, PP and CP in which the trainer would run on ``world_size`` ranks; the rest of ``parallel`` stays.

    Raises:
        ConfigError: there is none; says why not the plainest.
    """
    sizes = [n for n in range(1, world_size + 1) if world_size % n == 0]
    found, refusals = [], []
    for tensor, pipeline, context, expert in itertools.product(sizes, repeat=4):
        changes = {"tp": tensor, "pp": pipeline, "cp": context, "ep": expert}
        try:
            parallel = ParallelConfig.model_validate(
                config.parallel.model_dump() | {"world_size": world_size} | changes
            )
            check_layout(spec, parallel)
            RunConfig.model_validate(dict(config) | {"parallel": parallel})
        except ValidationError as error:
            refusals.append(error.errors()[0]["msg"].removeprefix("Value error, "))
        except ConfigError as error:
            refusals.append(str(error))
        else:
            found.append(parallel)
    if not found:
        reason = f"with none above 1: {refusals[0]}" if refusals else "give at least 1"
        raise ConfigError(f"--gpus {world_size}: no TP, EP, PP and CP suit the model and the configuration; {reason}")
    return found


def render(config: RunConfig, gpus: int | None, gpu_memory_gb: float) -> str:
    """The table of ``megatron-fr plan``.

    Args:
        gpus: of the trainer, for which every legal layout is listed; None: the configuration's own layout only.
        gpu_memory_gb: of one GPU, 10^9 bytes.

    Raises:
        ConfigError: the trainer would refuse the layout, or there is no legal one.
        ModelError: the model folder cannot be read, or the trainer cannot build the model.
    """
    spec = read_spec(config.model.path)
    check_aux_loss(spec, config.train.moe_aux_loss_coeff)
    width = _DTYPE_BYTES[config.model.dtype]
    if gpus is None:
        check_layout(spec, config.parallel)
    layouts = [config.parallel] if gpus is None else legal_layouts(spec, config, gpus)
    tensors = hf_tensor_specs(spec, torch.bfloat16 if width == 2 else torch.float32)
    sync = sum(tensor.num_bytes for tensor in tensors)
    token = 2 * spec.layers * spec.kv_size * width // min(config.rollout.engine_tp, spec.kv_heads)
    contexts = -(-config.rollout.max_concurrent_trajectories // config.rollout.engines) * config.rollout.max_context
    engine_weights = sync / config.rollout.engine_tp
    usable = gpu_memory_gb * USABLE * 1e9
    if engine_weights + token * config.rollout.max_context > usable:
        engine = "weights and one trajectory do not fit; raise rollout.engine_tp"
    elif engine_weights + token * contexts > usable:
        engine = "does not fit at once; runners will wait for room"
    else:
        engine = "fits"
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
        parts = (
            memory.weights,
            memory.gradients,
            memory.optimizer,
            memory.activations,
            memory.head,
            memory.batch,
            memory.total,
        )
        gb = [f"{part / 1e9:.2f}" for part in parts]
        lines.append(
            f"{p.tp:4}{p.ep:4}{p.pp:4}{p.cp:4}{p.dp:4}"
            f"{memory.dense_parameters + memory.expert_parameters:16,}{gb[0]:>10}{gb[1]:>11}{gb[2]:>11}{gb[3]:>13}"
            f"{gb[4]:>8}{gb[5]:>8}{gb[6]:>8}  {'yes' if memory.total <= usable else 'no'}"
        )
    return "\n".join(lines)
