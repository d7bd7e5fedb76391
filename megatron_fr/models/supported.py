"""What the trainer accepts: models, and layouts of a model. Refused here before anything is built; reads no weights."""

from __future__ import annotations

from typing import Any

from megatron_fr.config.sections import ParallelConfig
from megatron_fr.errors import ConfigError, ModelError
from megatron_fr.models.dims import Dims
from megatron_fr.models.registry import family_of


def check_model(hf_config: Any, aux_loss_coeff: float) -> None:
    """Accept the models that the trainer can build.

    Args:
        aux_loss_coeff: ``train.moe_aux_loss_coeff``.

    Raises:
        ModelError: the architecture is unknown, or the model has a feature that is not supported.
        ConfigError: there are no experts to balance.
    """
    family = family_of(hf_config)
    name = hf_config.model_type

    def refuse(field: str, value: Any, supported: str) -> ModelError:
        return ModelError(f"model of type {name}: {field}={value!r} is not supported; only {supported} is")

    rope = getattr(hf_config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise refuse("rope_parameters.rope_type", rope["rope_type"], "'default' (no scaling)")
    if "rope_theta" not in rope:
        raise refuse("rope_parameters", rope, "one with rope_theta")
    if hf_config.hidden_act != "silu":
        raise refuse("hidden_act", hf_config.hidden_act, "'silu'")
    if getattr(hf_config, "attention_bias", False):
        raise refuse("attention_bias", True, "false")
    if getattr(hf_config, "use_sliding_window", False):
        raise refuse("use_sliding_window", True, "false")
    if aux_loss_coeff and not family.moe:
        raise ConfigError(
            f"train.moe_aux_loss_coeff={aux_loss_coeff}: the model has no experts to balance; set it to 0"
        )


def check_layout(hf_config: Any, parallel: ParallelConfig) -> None:
    """Accept the layouts in which the trainer can build a model.

    Raises:
        ConfigError: a size does not divide the model's, the model has no experts to split, or see
            :func:`uses_sequence_parallel`.
    """
    dims = Dims.from_hf(hf_config)
    parts = [
        ("parallel.tp", parallel.tp, "KV heads", dims.kv_heads),
        ("parallel.tp", parallel.tp, "query heads", dims.heads),
        ("parallel.pp", parallel.pp, "layers", dims.layers),
        (
            "parallel.pp x parallel.vpp",
            parallel.pp * parallel.vpp,
            "layers",
            dims.layers,
        ),
    ]
    if dims.experts:
        parts.append(("parallel.ep", parallel.ep, "experts", dims.experts))
        parts.append(("parallel.etp", parallel.etp, "expert MLP width", dims.moe_ffn))
    if len(dims.moe_layers) < dims.layers:
        parts.append(("parallel.tp", parallel.tp, "MLP width", dims.ffn))
    if not dims.experts and parallel.ep * parallel.etp > 1:
        raise ConfigError(
            f"parallel.ep={parallel.ep}, parallel.etp={parallel.etp}: the model has no experts; set both to 1"
        )
    for field, size, what, whole in parts:
        if whole % size:
            raise ConfigError(f"{field}={size} does not divide the model's {what} ({whole}); choose a divisor")
    uses_sequence_parallel(hf_config, parallel)


def uses_sequence_parallel(hf_config: Any, parallel: ParallelConfig) -> bool:
    """Resolve ``parallel.sequence_parallel``; None means on when TP > 1 and the model has experts.

    Raises:
        ConfigError: off with TP > 1 and experts, which Megatron-Core cannot train.
    """
    moe = family_of(hf_config).moe
    setting = parallel.sequence_parallel
    if setting is None:
        return parallel.tp > 1 and moe
    if not setting and parallel.tp > 1 and moe:
        raise ConfigError(
            f"parallel.sequence_parallel=false with parallel.tp={parallel.tp}: Megatron-Core trains experts "
            "under tensor parallelism only with it; leave it out"
        )
    return setting and parallel.tp > 1
