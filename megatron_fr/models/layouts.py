"""The layouts of a model that the trainer accepts. Others are refused before anything is built; reads no weights."""

from megatron_fr.config.sections import ParallelConfig
from megatron_fr.errors import ConfigError
from megatron_fr.models.spec import ModelSpec


def check_aux_loss(spec: ModelSpec, coefficient: float) -> None:
    """Accept ``train.moe_aux_loss_coeff``; a ConfigError says why not."""
    if coefficient and not spec.moe:
        raise ConfigError(f"train.moe_aux_loss_coeff={coefficient}: the model has no experts to balance; set it to 0")
    if coefficient and spec.transformer.get("moe_router_enable_expert_bias"):
        raise ConfigError(
            f"train.moe_aux_loss_coeff={coefficient}: this loss is of softmax routers, and the model's has a "
            "correction bias; set it to 0"
        )


def check_layout(spec: ModelSpec, parallel: ParallelConfig) -> None:
    """Accept the layouts in which the trainer can build a model; a ConfigError says why not."""
    parts = [
        ("parallel.tp", parallel.tp, "KV heads", spec.kv_heads),
        ("parallel.tp", parallel.tp, "query heads", spec.heads),
        ("parallel.pp", parallel.pp, "layers", spec.layers),
        ("parallel.pp x parallel.vpp", parallel.pp * parallel.vpp, "layers", spec.layers),
    ]
    if spec.moe:
        parts.append(("parallel.ep", parallel.ep, "experts", spec.experts))
        parts.append(("parallel.tp", parallel.tp, "shared experts' width", spec.shared_ffn))
        parts.append(("parallel.etp", parallel.etp, "expert MLP width", spec.moe_ffn))
    elif parallel.ep * parallel.etp > 1:
        raise ConfigError(
            f"parallel.ep={parallel.ep}, parallel.etp={parallel.etp}: the model has no experts; set both to 1"
        )
    if len(spec.moe_layers) < spec.layers:
        parts.append(("parallel.tp", parallel.tp, "MLP width", spec.ffn))
    for field, size, what, whole in parts:
        if whole % size:
            raise ConfigError(f"{field}={size} does not divide the model's {what} ({whole}); choose a divisor")
    uses_sequence_parallel(spec, parallel)


def uses_sequence_parallel(spec: ModelSpec, parallel: ParallelConfig) -> bool:
    """Resolve ``parallel.sequence_parallel``; None means on when TP > 1 and the model has experts.

    Raises:
        ConfigError: off with TP > 1 and experts.
    """
    needed, setting = parallel.tp > 1 and spec.moe, parallel.sequence_parallel
    if needed and setting is False:
        raise ConfigError(
            f"parallel.sequence_parallel=false with parallel.tp={parallel.tp}: Megatron-Core trains experts "
            "under tensor parallelism only with it; leave it out"
        )
    return needed or (bool(setting) and parallel.tp > 1)
