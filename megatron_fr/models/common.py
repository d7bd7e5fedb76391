"""What families share: reading ``config.json``, of which every field must be accounted for, and weight mappings."""

from typing import Any

from megatron_fr.errors import ModelError
from megatron_fr.models.mappings import QKV, Copy, GatedMLP, RowParallel, WeightMapping

#: Fields that no forward pass with given tokens depends on, in training without dropout.
_NOT_COMPUTED = frozenset(
    {
        *("_name_or_path", "architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range", "attention_dropout"),
        *("id2label", "label2id", "problem_type", "return_dict", "output_attentions", "output_hidden_states"),
        *("output_router_logits", "router_aux_loss_coef", "max_window_layers"),
    }
)
#: Values with which a feature is off; so is a factor of 1.0.
_OFF: tuple[Any, ...] = (None, False, "", [], {})
#: Prefixes of a layer's tensors in Hugging Face files and of its parameters in Megatron-Core.
LAYER = "model.layers.{layer}."
PARAM = "decoder.layers.{layer}."


class ConfigFields:
    """Reads a transformers configuration and remembers which fields were asked for.

    Its ``rope_parameters`` are fields named ``rope_parameters.rope_theta`` and so on.
    """

    def __init__(self, hf_config: Any) -> None:
        self._model_type = hf_config.model_type
        self._names = dict(hf_config.attribute_map)
        values = hf_config.to_dict()
        rope = values.pop("rope_parameters", None) or {}
        self._values = values | {f"rope_parameters.{name}": value for name, value in rope.items()}
        self._asked = set(_NOT_COMPUTED)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field; ``default`` where the configuration has none or null."""
        name = self._names.get(name, name)
        self._asked.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def number(self, name: str, default: Any = None) -> Any:
        """The value of a field that must be a number above 0, or a ModelError."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or not value > 0:
            raise ModelError(f"config.json: {name} is {value!r}, expected a number above 0")
        return value

    def only(self, name: str, supported: Any, default: Any = None) -> None:
        """Accept one value of a field; any other is a ModelError."""
        if (value := self.get(name, default)) != supported:
            raise ModelError(
                f"config.json of a {self._model_type}: {name}={value!r} is not supported, only {supported!r} is; "
                "use a model with that value"
            )

    def refuse_rest(self) -> None:
        """Raise a ModelError that names the fields nothing asked for, but for those that turn their feature off."""
        unknown = [
            f"{name}={value!r}"
            for name, value in self._values.items()
            if name not in self._asked and value not in _OFF and not (isinstance(value, float) and value == 1)
        ]
        if unknown:
            raise ModelError(
                f"config.json of a {self._model_type}: {', '.join(unknown)}: unknown here, and may change what the "
                "model computes; use a model without it, or, if it changes nothing, remove it from config.json"
            )


def common_fields(config: ConfigFields) -> dict[str, Any]:
    """Arguments of ModelSpec that every family reads alike; a ModelError where no family supports a value."""
    config.only("hidden_act", "silu")
    config.only("rope_parameters.rope_type", "default", "default")
    config.only("use_sliding_window", False, False)
    layers, hidden, heads = map(config.number, ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    config.only("layer_types", ["full_attention"] * layers, ["full_attention"] * layers)
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.number("num_key_value_heads"),
        "head_dim": config.number("head_dim", hidden // heads),
        "ffn": config.number("intermediate_size"),
        "vocab": config.number("vocab_size"),
        "tie": config.get("tie_word_embeddings", False),
        "norm_eps": config.number("rms_norm_eps"),
        "rope_theta": config.number("rope_parameters.rope_theta"),
        "max_positions": config.number("max_position_embeddings"),
        "quantized": config.get("quantization_config") is not None,
    }


def replicated(param: str, hf: str, *shape: str, kind: type[Copy] = Copy) -> WeightMapping:
    """A layer's tensor that every rank holds, of this shape."""
    return kind(f"{PARAM}{param}", (f"{LAYER}{hf}",), (shape,))


def attention(*, bias: bool = False, qk_norm: bool = False) -> tuple[WeightMapping, ...]:
    """Input norm, projections, and what the family adds: biases of q, k and v, or norms of queries and keys."""
    param, hf = "self_attention.", "self_attn."
    weights = [replicated("input_layernorm.weight", "input_layernorm.weight", "hidden")]
    for kind, tail in (("weight", ("hidden",)), *([("bias", ())] if bias else [])):
        names = tuple(f"{LAYER}{hf}{part}_proj.{kind}" for part in "qkv")
        shapes = tuple((size, *tail) for size in ("q_size", "kv_size", "kv_size"))
        weights.append(QKV(f"{PARAM}{param}linear_qkv.{kind}", names, shapes))
    for part in "qk" if qk_norm else "":
        weights.append(replicated(f"{param}{part}_layernorm.weight", f"{hf}{part}_norm.weight", "head_dim"))
    output = RowParallel(f"{PARAM}{param}linear_proj.weight", (f"{LAYER}{hf}o_proj.weight",), (("hidden", "q_size"),))
    return (*weights, output)


_PRE_MLP_NORM = replicated("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "hidden")


def dense_mlp() -> tuple[WeightMapping, ...]:
    """The norm before the MLP, and the gated MLP."""
    return (_PRE_MLP_NORM, *gated_mlp("mlp.", "mlp.", "ffn"))


def moe_mlp() -> tuple[WeightMapping, ...]:
    """The norm before the experts, the router, and every expert's gated MLP."""
    return (
        _PRE_MLP_NORM,
        replicated("mlp.router.weight", "mlp.gate.weight", "experts", "hidden"),
        *gated_mlp("mlp.experts.local_experts.{expert}.", "mlp.experts.{expert}.", "moe_ffn"),
    )


def gated_mlp(param: str, hf: str, width: str) -> tuple[WeightMapping, ...]:
    """The two matrices of a gated MLP under these prefixes; ``width`` names its size."""
    inputs = tuple(f"{LAYER}{hf}{part}_proj.weight" for part in ("gate", "up"))
    return (
        GatedMLP(f"{PARAM}{param}linear_fc1.weight", inputs, ((width, "hidden"),) * 2),
        RowParallel(f"{PARAM}{param}linear_fc2.weight", (f"{LAYER}{hf}down_proj.weight",), (("hidden", width),)),
    )
