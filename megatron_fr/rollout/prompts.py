"""Prompts from JSONL or parquet files, or from a hub dataset."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_fr.agents.contract import Prompt
from megatron_fr.config.paths import PROMPT_FORMATS, check_prompt_source
from megatron_fr.errors import ConfigError

_ROLES = ("system", "user", "assistant", "tool")


def load_prompts(source: str | Path, split: str = "train") -> list[Prompt]:
    """Read every prompt of ``source``.

    A record holds ``prompt`` (a string, or a list of messages) or ``messages``; ``answer``; ``id`` (the record's number
    in the source where it is missing). Everything else becomes the prompt's metadata.

    Args:
        source: a ``.jsonl`` or ``.parquet`` file; else a folder or the name of a hub dataset that the ``datasets``
            package can read.
        split: of such a dataset.

    Raises:
        ConfigError: the source does not exist or a record is malformed; names the file, the line and the field.
    """
    check_prompt_source(source)
    path = Path(source)
    if path.suffix in PROMPT_FORMATS:
        records: Iterable[_Record] = _read_jsonl(path) if path.suffix == ".jsonl" else _read_parquet(path)
    else:
        records = _read_dataset(str(source), split)
    prompts = [_prompt(where, number, record) for where, number, record in records]
    if not prompts:
        raise ConfigError(f"prompts {str(source)!r}: holds no record")
    seen: dict[str, int] = {}
    for number, prompt in enumerate(prompts):
        if prompt.id in seen:
            raise ConfigError(
                f"prompts {str(source)!r}: records {seen[prompt.id] + 1} and {number + 1} share id={prompt.id!r}; "
                "make ids unique, or leave them out"
            )
        seen[prompt.id] = number
    return prompts


_Record = tuple[str, int, Any]  # where it is, its number from 0, its content


def _read_jsonl(path: Path) -> Iterator[_Record]:
    number = 0
    with path.open(encoding="utf-8") as lines:
        try:
            for line_number, line in enumerate(lines, 1):
                if line.strip():
                    where = f"prompts {str(path)!r}, line {line_number}"
                    try:
                        yield where, number, json.loads(line)
                    except json.JSONDecodeError as error:
                        raise ConfigError(f"{where}: is no JSON: {error}") from error
                    number += 1
        except UnicodeDecodeError as error:
            raise ConfigError(f"prompts {str(path)!r}: is not UTF-8: {error}; convert it") from error


def _read_parquet(path: Path) -> Iterator[_Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for record in batch.to_pylist():
                    yield f"prompts {str(path)!r}, row {number + 1}", number, record
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"prompts {str(path)!r}: is no readable parquet file: {error}") from error


def _read_dataset(name: str, split: str) -> Iterable[_Record]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"prompts {name!r}: is no file, and reading a hub dataset needs the 'datasets' package; install it, or "
            "give the path of a JSONL or parquet file"
        ) from error
    try:
        dataset = datasets.load_dataset(name, split=split)
    except Exception as error:  # the hub's errors share no base class
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"prompts {name!r}: is neither a file nor a dataset that could be read (split {split!r}): {reason[0]}"
        ) from error
    return ((f"prompts {name!r}, row {i + 1}", i, dict(record)) for i, record in enumerate(dataset))


def _prompt(where: str, number: int, record: Any) -> Prompt:
    if not isinstance(record, Mapping):
        raise ConfigError(
            f"{where}: is {type(record).__name__}, expected an object with a field 'prompt' or 'messages'"
        )
    rest = dict(record)
    given = [name for name in ("prompt", "messages") if rest.get(name) is not None]
    if len(given) != 1:
        what = "both 'prompt' and 'messages'" if given else "neither 'prompt' nor 'messages'"
        raise ConfigError(f"{where}: has {what}; give one")
    content = rest[given[0]]
    rest.pop("prompt", None)
    rest.pop("messages", None)
    if isinstance(content, str):
        content = [{"role": "user", "content": content}]
    messages = _messages(f"{where}, field {given[0]!r}", content)
    answer = rest.pop("answer", None)
    own_id = rest.pop("id", None)
    return Prompt(str(number if own_id is None else own_id), messages, answer, rest)


def _messages(where: str, content: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(content, Sequence) or not content:
        raise ConfigError(f"{where}: is {_short(content)}, expected a string or a list of messages")
    for i, message in enumerate(content):
        if not isinstance(message, Mapping):
            raise ConfigError(f"{where}[{i}]: is {_short(message)}, expected an object with 'role' and 'content'")
        if message.get("role") not in _ROLES:
            raise ConfigError(f"{where}[{i}].role: is {message.get('role')!r}, expected one of {', '.join(_ROLES)}")
        if not isinstance(message.get("content"), str):
            raise ConfigError(f"{where}[{i}].content: is {_short(message.get('content'))}, expected a string")
    if not any(message["content"].strip() for message in content):
        raise ConfigError(f"{where}: is empty")
    return tuple(dict(message) for message in content)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
