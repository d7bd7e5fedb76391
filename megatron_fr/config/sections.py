"""The sections of a run's configuration. One line a field; bounds and contradictions are checked here."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Strict and immutable: an unknown field is an error, and nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The policy to train."""

    path: str = Field(description="Hugging Face folder, or a hub name")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="parameter and activation dtype")
    transformer_impl: Literal["auto", "te", "local"] = Field(
        "auto", description="Transformer Engine on GPUs, Megatron's local layers on CPUs"
    )


class ParallelConfig(Section):
    """How the trainer's ranks are laid out; data parallelism takes what remains of the world."""

    world_size: int = Field(1, ge=1, description="trainer ranks")
    tp: int = Field(1, ge=1, description="TP size")
    ep: int = Field(1, ge=1, description="EP size")
    etp: int = Field(1, ge=1, description="TP size inside an expert")
    pp: int = Field(1, ge=1, description="PP size")
    vpp: int = Field(1, ge=1, description="model chunks a pipeline rank; above 1 the schedule interleaves")
    cp: int = Field(1, ge=1, description="CP size")
    sequence_parallel: bool | None = Field(None, description="None: on when TP > 1 and the model has experts")
    distributed_optimizer: bool = Field(True, description="shard optimizer state over DP ranks")

    @model_validator(mode="after")
    def _fits(self) -> ParallelConfig:
        dense = self.tp * self.pp * self.cp
        if self.world_size % dense:
            raise ValueError(
                f"parallel.world_size={self.world_size} is not a multiple of tp x pp x cp = {dense}; change one of them"
            )
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(
                f"parallel.vpp={self.vpp} with parallel.pp=1: there is no pipeline to "
                "interleave; set it to 1, or raise parallel.pp"
            )
        moe = self.ep * self.etp * self.pp
        if self.world_size % moe:
            raise ValueError(
                f"parallel.world_size={self.world_size} is not a multiple of ep x etp x pp = {moe}; change one of them"
            )
        return self

    @property
    def dp(self) -> int:
        """DP size of the dense layers."""
        return self.world_size // (self.tp * self.pp * self.cp)


_ADVANTAGES = ("batch_mean", "leave_one_out", "group", "positive_only", "none")
_ADVANTAGE = f"the baseline subtracted from rewards: {', '.join(_ADVANTAGES)}, or module:function"
_GROUP_SIZE = "rollouts per prompt; above 1 only with advantage=group or an advantage of your own"


def _known_advantage(value: str) -> str:
    if value not in _ADVANTAGES and ":" not in value:
        raise ValueError(
            f"algorithm.advantage={value!r} is unknown; choose one of {', '.join(_ADVANTAGES)}, or give module:function"
        )
    return value


Advantage = Annotated[str, AfterValidator(_known_advantage)]


def _check_groups(advantage: str, group_size: int) -> None:
    if ":" not in advantage and (advantage == "group") != (group_size > 1):
        raise ValueError(
            f"algorithm.advantage={advantage!r} with algorithm.group_size={group_size}: groups need advantage=group or "
            "an advantage of your own, and group_size of 2 or more; every other advantage needs group_size=1"
        )


class FlashReinforceConfig(Section):
    """FlashREINFORCE and its ablations; the defaults are the published method."""

    name: Literal["flash_reinforce"] = "flash_reinforce"
    advantage: Advantage = Field("batch_mean", description=_ADVANTAGE)
    reduction: Literal["sample_mean", "token_mean"] = Field(
        "sample_mean", description="average over tokens first, or flat"
    )
    admission: Literal["sequence", "token", "off"] = Field(
        "sequence", description="trust region on whole trajectories or tokens"
    )
    importance: Literal["token", "truncated", "off"] = Field("token", description="importance ratio on tokens")
    delta: float = Field(1e-3, ge=0, description="trust-region threshold on the Bernoulli KL, nats")
    truncation: float = Field(2.0, gt=0, description="cap of the ratio when importance=truncated")
    failure_token_quantile: float = Field(
        1.0, gt=0, le=1, description="share of a failure's highest-entropy tokens that keep their loss; 1 keeps all"
    )
    group_size: int = Field(1, ge=1, description=_GROUP_SIZE)

    @model_validator(mode="after")
    def _consistent(self) -> FlashReinforceConfig:
        _check_groups(self.advantage, self.group_size)
        return self


class GRPOConfig(Section):
    """GRPO, the baseline: synchronous groups, std-normalised advantages, PPO clip."""

    name: Literal["grpo"] = "grpo"
    group_size: int = Field(8, ge=2, description="rollouts per prompt")
    clip_low: float = Field(0.2, gt=0, lt=1, description="PPO clip: ratio floor 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, description="PPO clip: ratio ceiling 1 + clip_high")


class OwnLossConfig(Section):
    """A loss of your own; chosen by naming it in ``algorithm.loss``."""

    name: Literal["own_loss"] = "own_loss"
    loss: str = Field(description="import path, module:function")
    loss_args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the loss")
    advantage: Advantage = Field("batch_mean", description=_ADVANTAGE)
    group_size: int = Field(1, ge=1, description=_GROUP_SIZE)

    @model_validator(mode="after")
    def _consistent(self) -> OwnLossConfig:
        _check_groups(self.advantage, self.group_size)
        return self


def _named(value: Any) -> Any:
    """``algorithm: grpo`` is short for ``algorithm: {name: grpo}``; a section without a name is FlashREINFORCE."""
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, dict):
        return value
    return {"name": "own_loss" if "loss" in value else "flash_reinforce", **value}


AlgorithmConfig = Annotated[
    Annotated[FlashReinforceConfig | GRPOConfig | OwnLossConfig, Field(discriminator="name")], BeforeValidator(_named)
]


class OptimizerConfig(Section):
    """AdamW with clipping and a schedule over updates."""

    lr: float = Field(1e-6, gt=0, description="peak learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam's first moment decay")
    beta2: float = Field(0.98, ge=0, lt=1, description="Adam's second moment decay")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon")
    weight_decay: float = Field(0.1, ge=0, description="decoupled; norms and biases are exempt, as Megatron does")
    clip_grad: float = Field(1.0, ge=0, description="global gradient norm; 0 turns clipping off")
    schedule: Literal["constant", "cosine", "linear"] = Field("cosine", description="after the warm-up")
    warmup_fraction: float = Field(0.03, ge=0, lt=1, description="share of updates spent warming up")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="final learning rate over the peak")


class TrainConfig(Section):
    """The update loop."""

    num_updates: int = Field(ge=1, description="batches to consume")
    batch_size: int = Field(128, ge=1, description="B: trajectories an update, over all DP ranks")
    micro_batch_size: int = Field(8, ge=1, description="trajectories a forward, padded to one length")
    max_tokens_per_micro_batch: int | None = Field(
        None, ge=1, description="pack a forward up to so many tokens without padding, in place of micro_batch_size"
    )
    routing_replay: Literal["off", "rollout", "record"] = Field(
        "rollout", description="rollout: replay the engine's routes (R3); record: the trainer's own, in recomputation"
    )
    replay_check_every: int = Field(
        0,
        ge=0,
        description="updates between forwards with the live router that measure what replay changes; each takes about "
        "a third of an update's forward and backward; 0, and where no routes are replayed: none",
    )
    moe_aux_loss_coeff: float = Field(
        0.0, ge=0, description="of the experts' load-balancing loss in each micro-batch; 0, as published, turns it off"
    )
    recompute: Literal["off", "selective", "full"] = Field(
        "off", description="activation recomputation; selective: of the attention's core only"
    )
    logprob_mode: Literal["keep", "recompute"] = Field(
        "keep", description="logits kept once for backward, or made again: less memory for one more product of the head"
    )
    logprob_chunk_tokens: int = Field(1024, ge=1, description="logits held at a time when logprob_mode=recompute")
    skip_without_signal: bool = Field(True, description="no optimizer step on a batch whose rewards are all equal")


class RolloutConfig(Section):
    """The engines and the runner pool."""

    engines: int = Field(1, ge=1, description="SGLang servers to start")
    engine_tp: int = Field(1, ge=1, description="TP size of one engine")
    engine_args: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="further SGLang server arguments, without the leading dashes"
    )
    host: str = Field("127.0.0.1", description="address the engines and the rollout service bind to")
    engine_port: int = Field(0, ge=0, le=65535, description="port of the first engine; 0 takes free ports")
    start_timeout_s: float = Field(300, gt=0, description="an engine must be ready within this time")
    request_timeout_s: float = Field(600, gt=0, description="one generation request")
    max_concurrent_trajectories: int = Field(64, ge=1, description="concurrent trajectories")
    max_context: int = Field(8192, ge=2, description="tokens of a trajectory, prompt and tool output included")
    max_new_tokens: int = Field(4096, ge=1, description="action tokens of a trajectory, over all its turns")
    temperature: float = Field(1.0, gt=0, description="of sampling; the trainer's logits are scaled alike")
    top_p: float = Field(1.0, description="must stay 1")
    top_k: int = Field(-1, description="must stay -1")
    min_p: float = Field(0.0, description="must stay 0")
    max_policy_lag: int = Field(4, ge=0, description="updates between sampling and training; 0 is synchronous")

    @model_validator(mode="after")
    def _full_support(self) -> RolloutConfig:
        for name, value, off in (("top_p", self.top_p, 1.0), ("top_k", self.top_k, -1), ("min_p", self.min_p, 0.0)):
            if value != off:
                raise ValueError(
                    f"rollout.{name}={value} cuts the sampling distribution's support, so importance ratios against it "
                    f"are wrong; set rollout.{name}={off}"
                )
        if self.max_new_tokens >= self.max_context:
            raise ValueError(
                f"rollout.max_new_tokens={self.max_new_tokens} leaves no room for a prompt in "
                f"rollout.max_context={self.max_context}; lower the first or raise the second"
            )
        return self


class ToolLimits(Section):
    """Bounds of one tool call."""

    timeout_s: float = Field(10.0, gt=0, description="wall time")
    memory_mb: int = Field(512, ge=16, description="address space")
    output_chars: int = Field(4096, ge=16, description="longer output is cut, with a note")
    require_network_isolation: bool = Field(True, description="refuse to start where the network cannot be cut off")


class AgentConfig(Section):
    """What happens between a prompt and a reward."""

    kind: str = Field("python_tool", description="registered agent name, or module:Class")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of a class of your own")
    max_turns: int = Field(10, ge=1, description="assistant turns a trajectory")
    max_tokens_per_turn: int | None = Field(None, ge=1, description="None: only the trajectory's limits bound a turn")
    system_prompt: str | None = Field(None, description="None: as the data gives it")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="variables of the chat template, for example {enable_thinking: false}"
    )
    tool: ToolLimits = Field(default_factory=ToolLimits)

    @model_validator(mode="after")
    def _free_names(self) -> AgentConfig:
        taken = {"conversation", "tools", "add_generation_prompt", "tokenize"} & self.chat_template_kwargs.keys()
        if taken:
            raise ValueError(
                f"agent.chat_template_kwargs sets {', '.join(sorted(taken))}, which the agent itself sets; remove it"
            )
        return self


class RewardConfig(Section):
    """The verifier."""

    function: str | None = Field(
        None, description="import path, module:function; None: the agent returns the reward itself"
    )
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")
    timeout_s: float = Field(
        10.0, gt=0, description="of one call: in its own process, or in the event loop for an async function"
    )
    max_consecutive_errors: int = Field(8, ge=1, description="that many raising calls in a row end the run")


class DataConfig(Section):
    """Prompts."""

    train: str = Field(description="JSONL or parquet file, or a hub dataset name")
    eval: str | None = Field(None, description="held-out prompts, same formats")
    train_split: str = Field("train", description="split of a hub dataset")
    eval_split: str = Field("test", description="split of a hub dataset")
    shuffle: bool = Field(True, description="shuffle each epoch with the run's seed")


class EvaluationSet(Section):
    """One named set of held-out prompts; what is None is as in ``evaluation``."""

    data: str = Field(description="held-out prompts, formats as in data.train")
    split: str = Field("test", description="split of a hub dataset")
    num_prompts: int | None = Field(None, ge=1, description="the first so many")
    samples: int | None = Field(None, ge=1, description="k of avg@k")
    temperature: float | None = Field(None, ge=0, description="of sampling; 0 is greedy")


class EvaluationConfig(Section):
    """Held-out evaluation, at the start, every so many updates, and at the end."""

    every: int = Field(0, ge=0, description="updates between evaluations; 0: only start and end")
    num_prompts: int = Field(128, ge=1, description="of each set, the first so many")
    samples: int = Field(1, ge=1, description="k of avg@k and pass@k")
    temperature: float | None = Field(
        None, ge=0, description="of sampling in evaluations; 0 is greedy, None is rollout.temperature"
    )
    pass_threshold: float = Field(0.5, description="a trajectory passes with a reward above this")
    sets: dict[str, EvaluationSet] = Field(
        default_factory=dict, description="named sets in place of data.eval; the first one's reward ranks checkpoints"
    )

    @model_validator(mode="after")
    def _names(self) -> EvaluationConfig:
        for name in self.sets:
            if re.fullmatch(r"[\w.-]+", name) is None:
                raise ValueError(f"evaluation.sets: {name!r} is no name; use letters, digits, '_', '-' and '.'")
        return self


class SyncConfig(Section):
    """Trainer to engines."""

    bucket_mb: int = Field(1024, ge=1, description="memory of one broadcast bucket, MiB")
    timeout_s: float = Field(300, gt=0, description="of every collective and request of a sync")
    verify: bool = Field(True, description="compare a checksum of every parameter of every engine with what was sent")
    probe_tokens: int = Field(16, ge=0, description="fresh tokens compared after each sync; 0 turns the check off")
    max_probe_difference: float = Field(
        0.1, gt=0, description="mean |log-probability difference| of the probe that ends the run as a broken sync"
    )


class CheckpointConfig(Section):
    """What is kept on disk: training checkpoints, to go on from, and Hugging Face folders, to use."""

    every: int = Field(
        20, ge=0, description="updates between training checkpoints; 0: only at the end and on interruption"
    )
    hf_every: int = Field(
        0, ge=0, description="updates between Hugging Face folders; 0: at the end and on interruption"
    )
    keep_last: int = Field(2, ge=1, description="training checkpoints that are kept, the newest undamaged ones")
    keep_best: int = Field(
        0, ge=0, description="further ones that are kept: the best held-out rewards, of those evaluated at their update"
    )
    resume: Literal["auto", "never"] = Field(
        "auto",
        description="auto: go on from the newest usable training checkpoint in output (some there, none usable: an "
        "error); never: start anew",
    )
    stop_grace_s: float = Field(
        300, gt=0, description="after an interruption, what the trainer may take to finish its update and save"
    )
