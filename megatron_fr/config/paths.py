"""What a run reads, as far as a look at the file system tells whether it is there. Imports nothing slow."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_fr.config import RunConfig
from megatron_fr.errors import ConfigError, ModelError

#: How prompts can be stored in one file.
PROMPT_FORMATS = (".jsonl", ".parquet")


def check_inputs(config: RunConfig) -> None:
    """Check the model and the prompts of a run, before anything slow starts.

    Raises:
        ModelError: see :func:`check_model_path`; or ``model.weights`` is no checkpoint.
        ConfigError: see :func:`check_prompt_source`.
    """
    check_model_path(config.model.path)
    if (weights := config.model.weights) is not None and not (weights / ".metadata").is_file():
        raise ModelError(f"model.weights={str(weights)!r} is no Megatron checkpoint: it has no .metadata")
    for source in (config.data.train, *(held_out.data for held_out in config.evaluation_sets.values())):
        check_prompt_source(source)


def check_model_path(path: str | Path) -> None:
    """Accept a folder, and what can be the name of a model on a hub.

    Raises:
        ModelError: it is neither.
    """
    if Path(path).is_dir():
        return
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) is None or str(path).startswith("."):
        raise ModelError(f"model.path={str(path)!r} is not a folder; give a Hugging Face folder or a hub name")


def check_prompt_source(source: str | Path) -> None:
    """Accept a file in one of :data:`PROMPT_FORMATS`, and what can be a folder or name for the ``datasets`` package.

    Raises:
        ConfigError: a file that does not exist, or in another format.
    """
    path = Path(source)
    if path.suffix in PROMPT_FORMATS:
        if not path.is_file():
            raise ConfigError(f"prompts {str(path)!r}: there is no such file; give one that ends in .jsonl or .parquet")
    elif path.is_file():
        raise ConfigError(f"prompts {str(path)!r}: unknown format {path.suffix!r}; give {' or '.join(PROMPT_FORMATS)}")
