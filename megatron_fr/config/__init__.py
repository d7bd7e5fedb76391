"""A run's configuration: typed, strict, one YAML file plus dotted overrides."""

from megatron_fr.config.load import RunConfig, load_config, save_config
from megatron_fr.config.sections import (
    AgentConfig,
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    FlashReinforceConfig,
    GRPOConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
    SyncConfig,
    ToolLimits,
    TrainConfig,
)

__all__ = [
    "AgentConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "DataConfig",
    "EvaluationConfig",
    "FlashReinforceConfig",
    "GRPOConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SyncConfig",
    "ToolLimits",
    "TrainConfig",
    "load_config",
    "save_config",
]
