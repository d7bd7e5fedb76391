"""Exceptions that users meet. Each message names the field, the value and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MegatronFRError(Exception):
    """Base of every error raised on purpose; the command line prints it without a traceback."""


class ConfigError(MegatronFRError):
    """The configuration is unknown, contradictory or out of range."""


class MissingExtraError(ConfigError):
    """A package that only an extra of this project brings is not installed."""


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Import optional packages within it; MissingExtraError names a missing one and ``extra``, which brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"the package {error.name} is not installed; pip install 'megatron-fr[{extra}]' brings it"
        raise MissingExtraError(message) from error


class ModelError(MegatronFRError):
    """A model folder is missing or damaged, or its architecture is not supported."""


class TrajectoryError(MegatronFRError):
    """A trajectory is invalid; the queue refuses it and the run goes on."""


class PromptTooLongError(TrajectoryError):
    """A prompt leaves no token to sample; trying it again cannot help."""


class EngineError(MegatronFRError):
    """An inference engine did not start, died, or gave an unusable answer."""


class RewardError(MegatronFRError):
    """The reward function raised, took too long, or returned no finite number."""


class AgentTimeoutError(MegatronFRError):
    """The agent did not end a trajectory within ``agent.timeout_s``."""


class ToolError(MegatronFRError):
    """The tool sandbox failed, not the code in it."""


class SyncError(MegatronFRError):
    """Weights did not reach the engines, or reached them changed."""


class UpdateError(MegatronFRError):
    """An update with values that are not finite was refused; the weights are unchanged."""


class RolloutEnded(MegatronFRError):
    """The rollout service stopped serving batches; the message gives its reason."""


class RequestFailed(RolloutEnded):
    """One request to the rollout service failed or timed out; the service may still run."""


class CheckpointError(MegatronFRError):
    """A training checkpoint cannot be written, read, or continued with this configuration."""


class UnreadableCheckpointError(CheckpointError):
    """A training checkpoint cannot be read for lack of permission or failing storage; it may be complete."""
