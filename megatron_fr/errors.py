"""The exceptions that users meet. Each message names the field, the value and the remedy."""

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
    """Import optional packages within it.

    Raises:
        MissingExtraError: one of them is not installed; names the package and the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"the package {error.name} is not installed; pip install 'megatron-fr[{extra}]' brings it"
        ) from error


class ModelError(MegatronFRError):
    """A model folder is missing, damaged, or of an architecture that has no mapping."""


class TrajectoryError(MegatronFRError):
    """A trajectory breaks its contract; it is refused at the queue's door, the run goes on."""


class EngineError(MegatronFRError):
    """An inference engine did not start, died, or answered something unusable."""


class RewardError(MegatronFRError):
    """The reward function could not be imported, or raised too often."""


class ToolError(MegatronFRError):
    """The tool sandbox itself failed (not the code that ran in it)."""


class SyncError(MegatronFRError):
    """Weights did not reach the engines, or what arrived is not what was sent."""


class UpdateError(MegatronFRError):
    """An update would have made the weights meaningless; it was not taken."""


class RolloutEnded(MegatronFRError):
    """The rollout service stopped serving batches; the message carries its reason."""


class RequestFailed(RolloutEnded):
    """One request to the rollout service failed or was not answered in time; the service itself may go on."""


class CheckpointError(MegatronFRError):
    """A training checkpoint cannot be written, read, or continued with this configuration."""


class UnreadableCheckpointError(CheckpointError):
    """A training checkpoint cannot be looked at: no permission, or storage that fails. It may well be whole."""
