"""Read, override, check and write a run's configuration."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator

from megatron_fr.config import sections
from megatron_fr.config.read_yaml import parse_yaml, read_yaml, write_yaml
from megatron_fr.errors import ConfigError

#: Old field names that are refused with the new one.
RENAMED = {
    "parallel.tensor": "parallel.tp",
    "parallel.expert": "parallel.ep",
    "parallel.expert_tensor": "parallel.etp",
    "parallel.pipeline": "parallel.pp",
    "parallel.virtual_pipeline": "parallel.vpp",
    "parallel.context": "parallel.cp",
    "rollout.engine_tensor": "rollout.engine_tp",
    "reward.max_consecutive_errors": "rollout.max_failure_rate",
    "agent.tool.require_network_isolation": "agent.tool.sandbox (bwrap or none)",
    "rollout.runners": "rollout.max_concurrent_trajectories",
}


class RunConfig(sections.Section):
    """Everything one run needs; see the sections for their fields."""

    seed: int = Field(0, ge=0, description="seed of prompt order, sampling and initialisation")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: GPUs if there are any")
    output: Path = Field(Path("runs/default"), description="folder of metrics, logs, checkpoints and the picture")
    model: sections.ModelConfig
    parallel: sections.ParallelConfig = sections.ParallelConfig()
    algorithm: sections.AlgorithmConfig = sections.FlashReinforceConfig()
    optimizer: sections.OptimizerConfig = sections.OptimizerConfig()
    train: sections.TrainConfig
    rollout: sections.RolloutConfig = sections.RolloutConfig()
    agent: sections.AgentConfig = sections.AgentConfig()
    reward: sections.RewardConfig = sections.RewardConfig()
    data: sections.DataConfig
    evaluation: sections.EvaluationConfig = sections.EvaluationConfig()
    sync: sections.SyncConfig = sections.SyncConfig()
    checkpoint: sections.CheckpointConfig = sections.CheckpointConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        batch, group, sync = f"train.batch_size={self.train.batch_size}", self.algorithm.group_size, self.sync
        if self.train.batch_size % group:
            raise ValueError(f"{batch} is not a multiple of algorithm.group_size={group}; change one of them")
        if self.train.batch_size == 1 and self.train.skip_without_signal:
            raise ValueError(f"{batch}: rewards of a batch of one are all equal, so no update would step; raise it")
        advantage = getattr(self.algorithm, "advantage", None)
        if self.train.batch_size == 1 and advantage in ("batch_mean", "leave_one_out", "positive_only"):
            raise ValueError(f"{batch} with algorithm.advantage={advantage!r}: compares a reward with itself; raise it")
        if self.train.batch_size < self.parallel.dp:
            raise ValueError(
                f"{batch} gives some of the {self.parallel.dp} data-parallel ranks no trajectory; "
                "raise it or use fewer ranks"
            )
        if sync.probe_tokens >= self.rollout.max_context:
            raise ValueError(
                f"sync.probe_tokens={sync.probe_tokens} leaves no room for a prompt in "
                f"rollout.max_context={self.rollout.max_context}; lower the first or raise the second"
            )
        if self.reward.function is None and ":" not in self.agent.kind:
            raise ValueError(
                f"reward.function is not set, and agent.kind={self.agent.kind!r} returns no reward; set "
                "reward.function, or name an agent of your own that returns one"
            )
        if self.data.eval is not None and self.evaluation.sets:
            raise ValueError(
                f"data.eval={self.data.eval!r} and evaluation.sets={', '.join(self.evaluation.sets)} are both given; "
                "move data.eval into evaluation.sets, under a name"
            )
        keep, saved, scored = self.checkpoint.keep_best, self.checkpoint.every, self.evaluation.every
        if keep and (not self.evaluation_sets or not saved or not scored):
            raise ValueError(
                f"checkpoint.keep_best={keep} needs updates that are both evaluated and saved; "
                "set data.eval or evaluation.sets, evaluation.every and checkpoint.every"
            )
        if keep and saved % scored and scored % saved:
            raise ValueError(
                f"checkpoint.keep_best={keep} with checkpoint.every={saved} and evaluation.every={scored} evaluates "
                "few of the updates that it saves; make one of the two a multiple of the other"
            )
        return self

    @property
    def evaluation_sets(self) -> dict[str, sections.EvaluationSet]:
        """Held-out sets by name, every field filled in; ``data.eval`` is the one without a name, ``""``."""
        common, sets = self.evaluation, self.evaluation.sets
        if self.data.eval is not None:
            sets = {"": sections.EvaluationSet(data=self.data.eval, split=self.data.eval_split)}
        temperature = self.rollout.temperature if common.temperature is None else common.temperature
        defaults = {"num_prompts": common.num_prompts, "samples": common.samples, "temperature": temperature}
        return {
            name: one.model_copy(update={k: v for k, v in defaults.items() if getattr(one, k) is None})
            for name, one in sets.items()
        }

    @property
    def max_policy_lag(self) -> int:
        """The bound that holds: GRPO is synchronous unless told otherwise."""
        if self.rollout.max_policy_lag is not None:
            return self.rollout.max_policy_lag
        return 0 if isinstance(self.algorithm, sections.GRPOConfig) else 4


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read ``path`` and apply ``section.field=value`` overrides, whose values are YAML.

    Raises:
        ConfigError: the file, an override or a field is wrong; names all such fields at once.
    """
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ConfigError(f"configuration {path} holds {type(values).__name__}, expected a mapping of sections")
    for override in overrides:
        _apply(values, override)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"configuration {path}:\n" + "\n".join(_explain(e) for e in error.errors())) from error


def save_config(config: RunConfig, path: str | Path) -> None:
    """Write the resolved configuration as YAML that :func:`load_config` reads back.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write_yaml(config.model_dump(mode="json"), path)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; free space or set output to another folder"
        ) from error


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override {override!r}: expected section.field=value")
    *parents, leaf = key.strip().lstrip("-").split(".")
    node = values
    for i, name in enumerate(parents):
        child = node.setdefault(name, {})
        if isinstance(child, str) and name == "algorithm":  # "algorithm: grpo" then "algorithm.group_size=4"
            child = node[name] = {"name": child}
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {'.'.join(parents[: i + 1])} is a value, not a section")
        node = child
    node[leaf] = parse_yaml(text, f"override {override!r}: the value")


def _explain(error: Any) -> str:
    """One line for one error of pydantic."""
    location = [str(part) for part in error["loc"] if part not in ("flash_reinforce", "grpo", "own_loss")]
    name, message = ".".join(location), error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"  {message}"
    if error["type"] == "missing":
        return f"  {name}: required, and not given"
    value = f"  {name}={error['input']!r}"
    if error["type"] != "extra_forbidden":
        return f"{value}: {message[0].lower()}{message[1:]}"
    if name in RENAMED:
        return f"{value}: renamed; write {RENAMED[name]}"
    known = _fields_at(location[:-1])
    close = difflib.get_close_matches(location[-1], known, n=1)
    remedy = f"did you mean {close[0]!r}?" if close else f"known fields: {', '.join(known)}"
    return f"{value}: unknown field; {remedy}"


def _fields_at(location: Sequence[str]) -> list[str]:
    """Names that a section allows; the union of all variants for a discriminated section."""
    models: list[type[BaseModel]] = [RunConfig]
    for part in location:
        annotations = [m.model_fields[part].annotation for m in models if part in m.model_fields]
        if annotations:  # else a name of the user's, as of an evaluation set
            models = [m for a in annotations for m in _models_of(a)]
    return sorted({name for m in models for name in m.model_fields})


def _models_of(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for a in get_args(annotation) for m in _models_of(a)]
