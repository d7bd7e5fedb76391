"""The fields of a model's ``config.json``: a family accounts for each of them, or the model is refused."""

from __future__ import annotations

from typing import Any

from megatron_fr.errors import ModelError

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


class ConfigFields:
    """Reads a transformers configuration and remembers which fields were asked for.

    Args:
        hf_config: its ``rope_parameters`` are read as fields named ``rope_parameters.rope_theta`` and so on.
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
        """A number above 0.

        Raises:
            ModelError: the field has another value.
        """
        value = self.get(name, default)
        if not isinstance(value, int | float) or not value > 0:
            raise ModelError(f"config.json: {name} is {value!r}, expected a number above 0")
        return value

    def only(self, name: str, supported: Any, default: Any = None) -> None:
        """Accept one value of a field.

        Raises:
            ModelError: the field has another value.
        """
        if (value := self.get(name, default)) != supported:
            raise ModelError(
                f"config.json of a {self._model_type}: {name}={value!r} is not supported, only {supported!r} is; "
                "use a model with that value"
            )

    def refuse_rest(self) -> None:
        """Refuse what nothing asked for, unless its value says that the feature is off.

        Raises:
            ModelError: names the fields.
        """
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
