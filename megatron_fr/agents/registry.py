"""Agents by name."""

from __future__ import annotations

import importlib
from typing import Any

from megatron_fr.agents.contract import Agent
from megatron_fr.config import AgentConfig
from megatron_fr.errors import ConfigError

#: Registered names and where their classes are; each takes ``(tokenizer, AgentConfig)``.
AGENTS: dict[str, str] = {
    "python_tool": "megatron_fr.agents.python_tool:PythonToolAgent",
    "single_turn": "megatron_fr.agents.single_turn:SingleTurnAgent",
}


def make_agent(config: AgentConfig, tokenizer: Any) -> Agent:
    """The agent that ``config.kind`` names: a registered name, or ``module:Class``.

    Raises:
        ConfigError: the name is unknown, or the class cannot be imported.
        ModelError: the tokenizer's chat template does not suit the agent.
    """
    path = AGENTS.get(config.kind, config.kind)
    module, colon, name = path.partition(":")
    if not colon:
        known = ", ".join(sorted(AGENTS))
        raise ConfigError(
            f"agent.kind={config.kind!r} is no registered agent ({known}); name one, or give module:Class"
        )
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"agent.kind={config.kind!r} cannot be imported: {error}; give module:Class of a class on PYTHONPATH"
        ) from error
    agent: Agent = factory(tokenizer, config)
    return agent
