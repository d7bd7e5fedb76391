"""Whether what a run reads can be there, by a look at the file system. Imports nothing slow."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_fr.config import RunConfig
from megatron_fr.errors import ConfigError, ModelError

#: How prompts can be stored in one file.
PROMPT_FORMATS = (".jsonl", ".parquet")


def check_inputs(config: RunConfig) -> None:
    """Check the model and the prompts of a run.

    Raises:
        ModelError: ``model.path`` or ``model.weights`` cannot be used.
        ConfigError: the prompts cannot be used.
    """
    check_model_path(config.model.path)
    if (weights := config.model.weights) is not None and not (weights / ".metadata").is_file():
        raise ModelError(f"model.weights={str(weights)!r} is no Megatron checkpoint: it has no .metadata")
    for source in (config.data.train, *(held_out.data for held_out in config.evaluation_sets.values())):
        check_prompt_source(source)


def check_model_path(path: str | Path) -> None:
    """Raise ModelError unless ``path`` is a folder or can be the name of a model on a hub."""
    named = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) is not None and not str(path).startswith(".")
    if not named and not Path(path).is_dir():
        raise ModelError(f"model.path={str(path)!r} is not a folder; give a Hugging Face folder or a hub name")


def check_prompt_source(source: str | Path) -> None:
    """Raise ConfigError for a missing file, or one in no :data:`PROMPT_FORMATS`; other text may name a hub dataset."""
    path = Path(source)
    if path.suffix in PROMPT_FORMATS:
        if not path.is_file():
            raise ConfigError(f"prompts {str(path)!r}: there is no such file; give one that ends in .jsonl or .parquet")
    elif path.is_file():
        raise ConfigError(f"prompts {str(path)!r}: unknown format {path.suffix!r}; give {' or '.join(PROMPT_FORMATS)}")
