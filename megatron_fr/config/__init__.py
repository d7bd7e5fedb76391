"""A run's configuration: typed, strict, one YAML file plus dotted overrides."""

from megatron_fr.config.load import RunConfig, load_config, save_config
from megatron_fr.config.sections import (
    AgentConfig,
    AlgorithmConfig,
    FlashReinforceConfig,
    GRPOConfig,
    OptimizerConfig,
    OwnLossConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
    ToolLimits,
)

__all__ = [
    "AgentConfig",
    "AlgorithmConfig",
    "FlashReinforceConfig",
    "GRPOConfig",
    "OptimizerConfig",
    "OwnLossConfig",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "ToolLimits",
    "load_config",
    "save_config",
]
