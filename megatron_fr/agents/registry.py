"""Agents by name."""

from __future__ import annotations

import inspect
from typing import Any, cast

from megatron_fr.agents.contract import Agent
from megatron_fr.config import AgentConfig
from megatron_fr.errors import ConfigError
from megatron_fr.runtime.importing import import_object

#: Import paths of the built-in agents.
AGENTS = {
    "python_tool": "megatron_fr.agents.python_tool:PythonToolAgent",
    "single_turn": "megatron_fr.agents.python_tool:SingleTurnAgent",
}


def make_agent(config: AgentConfig, tokenizer: Any) -> Agent:
    """The agent that ``config.kind`` names; ConfigError where there is none, or it does not take ``agent.args``."""
    path = AGENTS.get(config.kind, config.kind)
    if ":" not in path:
        raise ConfigError(
            f"agent.kind={config.kind!r} is no registered agent ({', '.join(AGENTS)}); name one, or give module:Class"
        )
    factory = import_object(path, "agent.kind")
    try:
        inspect.signature(factory).bind(tokenizer, config, **config.args)
    except TypeError as error:
        raise ConfigError(
            f"agent.args={config.args!r} do not fit agent.kind={config.kind!r}: {error}; it is called with "
            "(tokenizer, AgentConfig, **agent.args)"
        ) from error
    return cast(Agent, factory(tokenizer, config, **config.args))
