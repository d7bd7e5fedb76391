"""Model families by Hugging Face architecture name."""

import importlib
from typing import Any

from megatron_fr.errors import ModelError
from megatron_fr.models.common import ConfigFields
from megatron_fr.models.spec import ModelSpec

#: The module of this package that describes an architecture: its ``describe`` reads the fields of a configuration.
FAMILIES = {
    "Glm4MoeForCausalLM": "glm4_moe",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


def check_architectures(architectures: Any, where: str = "config.json") -> str:
    """The first of the architectures in ``where`` that has a family; a ModelError where none has."""
    for name in architectures if isinstance(architectures, list) else []:
        if isinstance(name, str) and name in FAMILIES:
            return name
    raise ModelError(
        f"{where}: model architecture {architectures} has no mapping; supported: {', '.join(sorted(FAMILIES))}"
    )


def model_spec(hf_config: Any) -> ModelSpec:
    """Describe the model that a transformers configuration belongs to.

    Raises:
        ModelError: no family has this architecture, or a field has a value that its family does not support.
    """
    name = check_architectures(list(hf_config.architectures or []))
    config = ConfigFields(hf_config)
    spec: ModelSpec = importlib.import_module(f"megatron_fr.models.{FAMILIES[name]}").describe(config)
    config.refuse_rest()
    if spec.moe and not 0 < spec.top_k <= spec.experts:
        raise ModelError(f"config.json: num_experts_per_tok is {spec.top_k}, of {spec.experts} experts; mend it")
    return spec
