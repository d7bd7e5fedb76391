"""Agents by name."""

from __future__ import annotations

import inspect
from typing import Any

from megatron_fr.agents.contract import Agent
from megatron_fr.config import AgentConfig
from megatron_fr.errors import ConfigError
from megatron_fr.runtime.importing import import_object

#: Registered names and where their classes are; each takes ``(tokenizer, AgentConfig)``.
AGENTS: dict[str, str] = {
    "python_tool": "megatron_fr.agents.python_tool:PythonToolAgent",
    "single_turn": "megatron_fr.agents.single_turn:SingleTurnAgent",
}


def make_agent(config: AgentConfig, tokenizer: Any) -> Agent:
    """The agent that ``config.kind`` names: a registered name, or ``module:Class``.

    Raises:
        ConfigError: the name is unknown, the class cannot be imported, or it does not take ``agent.args``.
        ModelError: the tokenizer's chat template does not suit the agent.
    """
    path = AGENTS.get(config.kind, config.kind)
    if ":" not in path:
        known = ", ".join(sorted(AGENTS))
        raise ConfigError(
            f"agent.kind={config.kind!r} is no registered agent ({known}); name one, or give module:Class"
        )
    factory = import_object(path, "agent.kind")
    try:
        inspect.signature(factory).bind(tokenizer, config, **config.args)
    except TypeError as error:
        raise ConfigError(
            f"agent.args={config.args!r} do not fit agent.kind={config.kind!r}: {error}; it is called with "
            "(tokenizer, AgentConfig, **agent.args)"
        ) from error
    agent: Agent = factory(tokenizer, config, **config.args)
    return agent
