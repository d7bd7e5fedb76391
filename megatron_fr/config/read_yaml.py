"""YAML with the scalars of YAML 1.2's core schema, and no key twice.

PyYAML follows YAML 1.1, which reads ``off`` as false, ``1:30`` as 90, ``010`` as 8 and ``1e-6`` as text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from megatron_fr.errors import ConfigError

_CORE = [
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                first = lines[key.tag, key.value]
                raise yaml.YAMLError(f"the key {key.value!r} is on line {first} and again on line {line}; keep one")
            lines[key.tag, key.value] = line
        return super().construct_mapping(node, deep)

    def construct_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


class _Dumper(yaml.SafeDumper):
    """Quotes what either version of YAML would read as something other than text."""


for _name, _pattern, _first in _CORE:
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_int)


def parse_yaml(text: str, name: str) -> Any:
    """The value of one YAML document; an error is one line that begins with ``name``.

    Raises:
        ConfigError: ``text`` is not valid YAML, or a mapping has a key twice.
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from error


def read_yaml(path: str | Path) -> Any:
    """The value in a UTF-8 file, whatever the locale is; ConfigError where it is none."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"configuration {path}: {error.strerror}; give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        where = f"byte {error.start} is 0x{error.object[error.start]:02x}"
        raise ConfigError(f"configuration {path} is not UTF-8 text ({where}); save it as UTF-8") from error
    return parse_yaml(text, f"configuration {path}")


def write_yaml(value: Any, path: str | Path) -> None:
    """Write ``value`` as ASCII YAML that :func:`read_yaml` reads back."""
    Path(path).write_text(yaml.dump(value, Dumper=_Dumper, sort_keys=False), encoding="utf-8")
