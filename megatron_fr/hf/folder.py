"""A Hugging Face model folder: where it is, its configuration, and its files that are no weights."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_fr.config.paths import check_model_path
from megatron_fr.errors import ModelError
from megatron_fr.models.registry import FAMILIES, check_architectures, model_spec
from megatron_fr.models.spec import ModelSpec

#: Endings of a model's files that are no weights; the weights' index, ``.index.json``, is none of them.
_COPIED_SUFFIXES = (".json", ".txt", ".jinja", ".model", ".tiktoken")
#: Each holds a vocabulary.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def resolve_folder(path: str | Path, *, weights: bool = True) -> Path:
    """A local folder as it is; a hub name such as ``Qwen/Qwen3-30B-A3B`` through the hub's cache.

    Without ``weights`` only what :func:`copy_other_files` copies is fetched. A ModelError says why there is no folder.
    """
    check_model_path(path)
    if (folder := Path(path)).is_dir():
        return folder
    from huggingface_hub import snapshot_download

    wanted, unwanted = None, ["*.bin", "*.pth", "*.gguf", "original/*"]
    if not weights:
        wanted, unwanted = [f"*{suffix}" for suffix in _COPIED_SUFFIXES], ["*.index.json", "*/*"]
    try:
        return Path(snapshot_download(str(path), allow_patterns=wanted, ignore_patterns=unwanted))
    except Exception as error:  # the hub client raises from several libraries
        raise ModelError(
            f"model.path={str(path)!r} is no local folder, and the hub did not give it: {error}; check the name"
        ) from error


def read_spec(path: str | Path) -> ModelSpec:
    """Describe a model folder or hub name, of which no weights are fetched.

    Raises:
        ModelError: the folder or its ``config.json`` is missing or damaged, or names something unsupported.
    """
    folder = resolve_folder(path, weights=False)
    config = _read_json(folder)
    stated_dtype(folder)
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    # Here, for transformers lists all that it knows, or asks whether to run code that came with the model.
    check_architectures(config.get("architectures"), str(folder / "config.json"))
    if config.get("model_type") not in list(CONFIG_MAPPING):
        raise ModelError(
            f"{folder / 'config.json'}: model_type {config.get('model_type')!r} is unknown; supported architectures: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    try:
        hf_config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers and its validators raise a dozen kinds
        raise ModelError(f"{folder / 'config.json'} cannot be read: {' '.join(str(error).split())[:300]}") from error
    return model_spec(hf_config)


def _read_json(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(
            f"model.path={str(folder)!r} has no config.json; give a complete Hugging Face folder"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}; fetch it again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds {type(config).__name__}, expected an object; fetch it again")
    return config


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def stated_dtype(folder: Path) -> torch.dtype | None:
    """The dtype that ``config.json`` states, None where it states none; a ModelError where it has another name."""
    config = _read_json(folder)
    name = config.get("dtype") or config.get("torch_dtype")
    if name is not None and name not in list(_DTYPES):  # a list: what is there need not be hashable
        raise ModelError(f"{folder / 'config.json'}: dtype is {name!r}; write one of {', '.join(_DTYPES)}")
    return None if name is None else _DTYPES[name]


def has_tokenizer(folder: Path) -> bool:
    """Whether a file of the folder holds a vocabulary; without one transformers makes an empty tokenizer."""
    return any((folder / name).exists() for name in _TOKENIZERS)


def check_links(folder: Path) -> None:
    """Raise a ModelError where a file is a link to what is not there, as into a cache that was emptied."""
    for file in folder.iterdir():
        if not file.exists():
            raise ModelError(f"{file} is a link to {file.readlink()}, which is not there; fetch the folder again")


def copy_other_files(source: Path, out: Path) -> None:
    """Copy configuration, generation configuration, tokenizer and chat template; not weights, and not their index.

    A folder without a tokenizer is said on standard error. Raises as :func:`check_links`.
    """
    check_links(source)
    for file in source.iterdir():
        if file.suffix in _COPIED_SUFFIXES and not file.name.endswith(".index.json"):
            shutil.copyfile(file, out / file.name)
    if not has_tokenizer(source):
        print(f"warning: {source} holds no tokenizer, so {out.name} has none either", file=sys.stderr)
