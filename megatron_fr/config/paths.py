"""Whether what a run reads can be there, by a look at the file system or a question to a hub. Imports nothing slow."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_fr.config import RunConfig
from megatron_fr.errors import ConfigError, ModelError

#: How prompts can be stored in one file.
PROMPT_FORMATS = (".jsonl", ".parquet")

_HUB_S = 5.0


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
    """Raise ModelError unless ``path`` is a folder or the name of a model on the hub, or in its cache when offline."""
    if Path(path).is_dir():
        return
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(path)) is None:
        raise ModelError(f"model.path={str(path)!r} is not a folder; give a Hugging Face folder or a hub name")
    if (reason := _why_not_on_hub(str(path), "model")) is not None:
        raise ModelError(f"model.path={str(path)!r} is no local folder, and {reason}")


def check_prompt_source(source: str | Path) -> None:
    """Raise ConfigError unless ``source`` is a file in one of :data:`PROMPT_FORMATS`, a folder, or a hub dataset."""
    path = Path(source)
    if path.suffix in PROMPT_FORMATS:
        if not path.is_file():
            raise ConfigError(f"prompts {str(path)!r}: there is no such file; give one that ends in .jsonl or .parquet")
    elif path.is_file():
        raise ConfigError(f"prompts {str(path)!r}: unknown format {path.suffix!r}; give {' or '.join(PROMPT_FORMATS)}")
    elif not path.is_dir():
        if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(source)) is None:
            raise ConfigError(f"prompts {str(path)!r}: is no file, folder or hub name; mend the path")
        if (reason := _why_not_on_hub(str(source), "dataset")) is not None:
            raise ConfigError(f"prompts {str(path)!r}: is no file or folder, and {reason}")


def _why_not_on_hub(name: str, kind: str) -> str | None:
    """Ask the hub once, for the libraries that fetch things try for minutes; None where they can be left to it."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json", repo_type=kind), str)
        HfApi().repo_info(name, repo_type=kind, timeout=_HUB_S)
    except OfflineModeIsEnabled:
        # The cache of datasets is another package's, which looks for itself.
        return None if cached or kind == "dataset" else "HF_HUB_OFFLINE is set and the cache does not hold it; unset it"
    except (RepositoryNotFoundError, HFValidationError):
        return f"the hub has no such {kind}, or not for you; check the spelling, or set HF_TOKEN for a private one"
    except Exception as error:  # the hub client raises from several libraries
        reason = f"the hub cannot be asked ({' '.join(str(error).split())[:200] or type(error).__name__})"
        return f"{reason}; check the network" + (", or take the cached copy with HF_HUB_OFFLINE=1" if cached else "")
    return None
