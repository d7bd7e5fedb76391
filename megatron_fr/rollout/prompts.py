"""Prompts from JSONL or parquet files, or from a hub dataset."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_fr.agents.contract import Prompt
from megatron_fr.config.paths import PROMPT_FORMATS, check_prompt_source
from megatron_fr.errors import ConfigError

_CONVERSATION = ("prompt", "messages")
_ROLES = ("system", "user", "assistant", "tool")


def load_prompts(source: str | Path, split: str = "train") -> list[Prompt]:
    """Read every prompt of ``source``.

    A record holds ``prompt`` (a string, or a list of messages) or ``messages``; ``answer``; ``id`` (the record's number
    in the source where it is missing). Everything else becomes the prompt's metadata.

    Args:
        source: a ``.jsonl`` or ``.parquet`` file; else a folder or hub name for the ``datasets`` package to read.
        split: of such a dataset.

    Raises:
        ConfigError: the source does not exist or a record is malformed; names the file, the line and the field.
    """
    check_prompt_source(source)
    path, name = Path(source), f"prompts {str(source)!r}"
    if path.suffix not in PROMPT_FORMATS:
        records = _read_dataset(name, str(source), split)
    else:
        records = _read_jsonl(name, path) if path.suffix == ".jsonl" else _read_parquet(name, path)
    prompts = [_prompt(f"{name}, {place}", number, record) for number, (place, record) in enumerate(records)]
    if not prompts:
        raise ConfigError(f"{name}: holds no record")
    seen: dict[str, int] = {}
    for number, prompt in enumerate(prompts, 1):
        if (first := seen.setdefault(prompt.id, number)) != number:
            raise ConfigError(
                f"{name}: records {first} and {number} share id={prompt.id!r}; make ids unique, or leave them out"
            )
    return prompts


# The readers yield each record's place in the source and its content.
def _read_jsonl(name: str, path: Path) -> Iterator[tuple[str, Any]]:
    place = ""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    place = f"line {number}"
                    record = json.loads(line)
                    if "\\ud" in line.lower():  # half a surrogate pair is no text that a tokenizer takes
                        json.dumps(record, ensure_ascii=False).encode()
                    yield place, record
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: is not UTF-8: {error}; convert it") from error
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name}, {place}: holds half a surrogate pair ({error.object[error.start]!r})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}, {place}: is no JSON: {error}") from error


def _read_parquet(name: str, path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            records = (record for batch in file.iter_batches() for record in batch.to_pylist())
            yield from ((f"row {number}", _from_arrow(record)) for number, record in enumerate(records, 1))
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{name}: is no readable parquet file: {error}") from error


def _read_dataset(name: str, source: str, split: str) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{name}: is no file, and reading a hub dataset needs the 'datasets' package; install it, or "
            "give the path of a JSONL or parquet file"
        ) from error
    try:
        dataset = datasets.load_dataset(source, split=split)
    except Exception as error:  # the hub's errors share no base class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{name}: is neither a file nor a dataset that could be read (split {split!r}): {reason}"
        ) from error
    yield from ((f"row {number}", _from_arrow(dict(record))) for number, record in enumerate(dataset, 1))


def _from_arrow(record: dict[str, Any]) -> dict[str, Any]:
    return record | {name: _without_nulls(record[name]) for name in _CONVERSATION if name in record}


def _without_nulls(value: Any) -> Any:
    """Arrow fills objects up with the fields that only others of their column have; those are left out."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _prompt(where: str, number: int, record: Any) -> Prompt:
    if not isinstance(record, Mapping):
        raise ConfigError(
            f"{where}: is {type(record).__name__}, expected an object with a field 'prompt' or 'messages'"
        )
    rest = dict(record)
    given = {name: value for name in _CONVERSATION if (value := rest.pop(name, None)) is not None}
    if len(given) != 1:
        what = "both 'prompt' and 'messages'" if given else "neither 'prompt' nor 'messages'"
        raise ConfigError(f"{where}: has {what}; give one")
    ((field, content),) = given.items()
    if isinstance(content, str) and field == "messages":  # of sets whose Arrow columns cannot mix types
        try:
            content = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}, field 'messages': is text, but no JSON: {error}") from error
    elif isinstance(content, str):
        content = [{"role": "user", "content": content}]
    _check_messages(f"{where}, field {field!r}", content)
    answer, own_id = rest.pop("answer", None), rest.pop("id", None)
    return Prompt(str(number if own_id is None else own_id), tuple(map(dict, content)), answer, rest)


def _check_messages(where: str, content: Any) -> None:
    if not isinstance(content, Sequence) or not content:
        raise ConfigError(f"{where}: is {reprlib.repr(content)}, expected a string or a list of messages")
    for i, message in enumerate(content):
        if not isinstance(message, Mapping):
            raise ConfigError(f"{where}[{i}]: is {reprlib.repr(message)}, expected an object with 'role' and 'content'")
        if message.get("role") not in _ROLES:
            raise ConfigError(f"{where}[{i}].role: is {message.get('role')!r}, expected one of {', '.join(_ROLES)}")
        if not isinstance(message.get("content"), str):
            raise ConfigError(f"{where}[{i}].content: is {reprlib.repr(message.get('content'))}, expected a string")
    if content[-1]["role"] == "assistant":
        raise ConfigError(
            f"{where}: ends with an assistant's message, which the policy is to write; leave it out, and give what "
            "the reward compares with as 'answer'"
        )
    if not any(message["content"].strip() for message in content):
        raise ConfigError(f"{where}: is empty")
