"""The sections of a run's configuration. One line a field; bounds and contradictions are checked here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Strict and immutable section of the configuration: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_truth_values_as_numbers(cls, values: Any) -> Any:
        """Pydantic takes true for 1; as text it is refused by the field's name."""
        if not isinstance(values, dict):
            return values
        numbers = {n for n, f in cls.model_fields.items() if {f.annotation, *get_args(f.annotation)} & {int, float}}
        return {n: str(v).lower() if isinstance(v, bool) and n in numbers else v for n, v in values.items()}


class ModelConfig(Section):
    """The policy to train."""

    path: str = Field(description="Hugging Face folder or hub name of the model to train")
    weights: Path | None = Field(None, description="Megatron checkpoint whose weights replace path's")
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="dtype of parameters and activations, and in engines"
    )
    transformer_impl: Literal["auto", "te", "local"] = Field(
        "auto", description="layers of Transformer Engine (te) or Megatron (local); auto is te on GPUs"
    )


class ParallelConfig(Section):
    """Layout of the trainer's ranks; data parallelism takes what remains of the world."""

    world_size: int = Field(1, ge=1, description="number of trainer ranks (processes, one per GPU)")
    tp: int = Field(1, ge=1, description="tensor-parallel size of attention and dense layers; 1 turns it off")
    ep: int = Field(1, ge=1, description="expert-parallel size; 1 keeps all experts on every rank")
    etp: int = Field(1, ge=1, description="tensor-parallel size inside each expert; 1 keeps experts whole")
    pp: int = Field(1, ge=1, description="number of pipeline stages; 1 turns the pipeline off")
    vpp: int = Field(1, ge=1, description="model chunks on each pipeline rank; above 1 the schedule interleaves them")
    cp: int = Field(1, ge=1, description="context-parallel size: ranks that share the tokens of one sequence")
    sequence_parallel: bool | None = Field(None, description="shard activations over TP; null: for experts only")
    distributed_optimizer: bool = Field(True, description="shard optimizer state over data-parallel ranks")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for sizes, product in (
            ("tp x pp x cp", self.tp * self.pp * self.cp),
            ("ep x etp x pp", self.ep * self.etp * self.pp),
        ):
            if self.world_size % product:
                raise ValueError(
                    f"parallel.world_size={self.world_size} is not a multiple of {sizes} = {product}; "
                    "change one of them"
                )
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(
                f"parallel.vpp={self.vpp} with parallel.pp=1: there is no pipeline to interleave; "
                "set it to 1, or raise parallel.pp"
            )
        return self

    @property
    def dp(self) -> int:
        """DP size of the dense layers."""
        return self.world_size // (self.tp * self.pp * self.cp)


_ADVANTAGES = ("batch_mean", "leave_one_out", "group", "positive_only", "none")


class AdvantageSection(Section):
    """How trajectories are compared: the fields that FlashREINFORCE and a loss of your own share."""

    advantage: str = Field("batch_mean", description=f"{', '.join(_ADVANTAGES)}, or module:function")
    group_size: int = Field(1, ge=1, description="rollouts of each prompt; above 1 with group or a module:function")

    @model_validator(mode="after")
    def _check_advantage(self) -> Self:
        if ":" in self.advantage:
            return self
        if self.advantage not in _ADVANTAGES:
            raise ValueError(
                f"algorithm.advantage={self.advantage!r} is unknown; choose one of {', '.join(_ADVANTAGES)}, or give "
                "module:function"
            )
        if (self.advantage == "group") != (self.group_size > 1):
            raise ValueError(
                f"algorithm.advantage={self.advantage!r} with algorithm.group_size={self.group_size}: groups need "
                "advantage=group and group_size of 2 or more, every other built-in advantage needs group_size=1"
            )
        return self


class FlashReinforceConfig(AdvantageSection):
    """FlashREINFORCE and its ablations; the defaults are the published method."""

    name: Literal["flash_reinforce"] = "flash_reinforce"
    reduction: Literal["sample_mean", "token_mean"] = Field(
        "sample_mean", description="mean of trajectory means (verl's seq-mean-token-mean), or mean of all tokens"
    )
    admission: Literal["sequence", "token", "off"] = Field(
        "sequence", description="what the trust region rejects: trajectories, tokens, or nothing"
    )
    importance: Literal["token", "truncated", "off"] = Field(
        "token",
        description="importance ratio of a token: exact, capped at truncation, or 1 (off, published without admission)",
    )
    delta: float = Field(1e-3, ge=0, description="trust-region threshold on the Bernoulli KL, in nats")
    truncation: float = Field(2.0, gt=0, description="largest importance ratio; used with importance=truncated only")
    failure_token_quantile: float = Field(
        1.0, gt=0, le=1, description="share of a failure's tokens, highest entropy first, that keep their loss"
    )
    failure_threshold: float = Field(
        0.0, description="largest reward of a failure; used with failure_token_quantile below 1 only"
    )


class GRPOConfig(Section):
    """GRPO, the baseline: groups, advantages divided by the group's standard deviation, PPO clip.

    The ratio's denominator is the policy before the update, so that the clip acts from the second step on.
    """

    name: Literal["grpo"] = "grpo"
    group_size: int = Field(8, ge=2, description="rollouts of each prompt; train.batch_size must be a multiple of it")
    clip_low: float = Field(0.2, gt=0, lt=1, description="PPO clip: the smallest ratio is 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, description="PPO clip: the largest ratio is 1 + clip_high")
    reduction: Literal["token_mean", "sample_mean"] = Field(
        "token_mean", description="mean of all tokens, or of trajectory means as in DeepSeekMath"
    )
    steps: int = Field(1, ge=1, description="optimizer steps on each batch; with 1 no ratio differs from 1")


class OwnLossConfig(AdvantageSection):
    """A loss of your own; `algorithm.loss` chooses it."""

    name: Literal["own_loss"] = "own_loss"
    loss: str = Field(description="loss function, module:function")
    loss_args: dict[str, Any] = Field({}, description="keyword arguments for the loss function")


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
    """AdamW with gradient clipping and a learning-rate schedule over updates."""

    lr: float = Field(1e-6, gt=0, description="peak learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam's decay of the first moment")
    beta2: float = Field(0.98, ge=0, lt=1, description="Adam's decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon")
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay; norms and biases have none")
    clip_grad: float = Field(1.0, ge=0, description="largest global norm of the gradient; 0 turns clipping off")
    schedule: Literal["constant", "cosine", "linear"] = Field("cosine", description="learning rate after the warm-up")
    warmup_fraction: float = Field(0.03, ge=0, lt=1, description="share of updates in which the rate rises from 0")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="learning rate of the last update over the peak")


class TrainConfig(Section):
    """One update: batch, routing replay and memory."""

    num_updates: int = Field(ge=1, description="number of batches to train on")
    batch_size: int = Field(128, ge=1, description="trajectories in one update, over all data-parallel ranks")
    micro_batch_size: int = Field(8, ge=1, description="trajectories in one forward, padded to the longest")
    max_tokens_per_micro_batch: int | None = Field(
        None, ge=1, description="tokens in one packed forward, without padding; null: micro_batch_size counts"
    )
    routing_replay: Literal["off", "rollout", "record"] = Field(
        "rollout", description="replay the engine's experts (rollout, R3), or the trainer's in recomputation (record)"
    )
    replay_check_every: int = Field(
        0, ge=0, description="updates between forwards that measure what replay changes (a third of an update); 0: none"
    )
    moe_aux_loss_coeff: float = Field(0.0, ge=0, description="weight of the experts' load-balancing loss; 0: off")
    recompute: Literal["off", "selective", "full"] = Field(
        "off", description="activations recomputed in the backward: none, core attention's (selective), or all (full)"
    )
    logprob_mode: Literal["keep", "recompute"] = Field(
        "keep", description="keep logits for the backward, or make them twice with less memory (recompute)"
    )
    logprob_chunk_tokens: int = Field(1024, ge=1, description="tokens whose logits exist at a time; used by recompute")
    skip_without_signal: bool = Field(True, description="take no optimizer step on a batch whose rewards are all equal")


class RolloutConfig(Section):
    """Engines, sampling and how far rollouts may lag behind the trainer."""

    engines: int = Field(1, ge=1, description="number of SGLang servers")
    engine_tp: int = Field(1, ge=1, description="tensor-parallel size of each engine")
    engine_args: dict[str, str | int | float | bool] = Field({}, description="more SGLang server arguments, no dashes")
    host: str = Field("127.0.0.1", description="address that engines and rollout service listen on")
    engine_port: int = Field(0, ge=0, le=65535, description="port of the first engine, others follow; 0: free ports")
    start_timeout_s: float = Field(300, gt=0, description="seconds until an engine must be ready")
    request_timeout_s: float = Field(600, gt=0, description="seconds that one generation request may take")
    max_concurrent_trajectories: int = Field(64, ge=1, description="trajectories that run at the same time")
    max_context: int = Field(8192, ge=2, description="tokens of one trajectory, prompt and tool output included")
    max_new_tokens: int = Field(4096, ge=1, description="tokens that the policy may sample in one trajectory")
    temperature: float = Field(1.0, gt=0, description="of sampling; the trainer divides its logits by it")
    top_p: float = Field(1.0, description="must stay 1: importance ratios need the whole distribution")
    top_k: int = Field(-1, description="must stay -1: importance ratios need the whole distribution")
    min_p: float = Field(0.0, description="must stay 0: importance ratios need the whole distribution")
    max_failure_rate: float = Field(0.2, ge=0, le=1, description="share of failing prompts above which the run ends")
    max_policy_lag: int | None = Field(
        None, ge=0, description="updates from sampling to training, older ones are dropped; null: 4, of grpo 0"
    )

    @model_validator(mode="after")
    def _full_support(self) -> Self:
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
    """Limits of one tool call."""

    timeout_s: float = Field(10.0, gt=0, description="seconds that one tool call may take")
    memory_mb: int = Field(512, ge=16, description="address space of one tool call, in MiB")
    output_chars: int = Field(4096, ge=16, description="characters that the model sees; the rest is cut, with a note")
    sandbox: Literal["bwrap", "none"] = Field("bwrap", description="none: run code unprotected, as the run's user")
    read_only_paths: list[Path] = Field(
        [Path("/bin/sh"), Path("/bin/echo"), Path("/usr/share/zoneinfo")],
        description="what tools may read beside Python, numpy and sympy; nothing else exists for them",
    )
    max_refusals: int = Field(16, ge=1, description="calls in a row that the sandbox may fail to run; more end the run")


class AgentConfig(Section):
    """What happens between a prompt and a reward."""

    kind: str = Field("python_tool", description="name of a built-in agent, or module:Class")
    args: dict[str, Any] = Field({}, description="keyword arguments for a class of your own")
    max_turns: int = Field(10, ge=1, description="assistant turns in one trajectory")
    timeout_s: float | None = Field(1800.0, gt=0, description="seconds that one trajectory may take; null: no limit")
    max_tokens_per_turn: int | None = Field(None, ge=1, description="tokens sampled in one turn; null: no limit")
    system_prompt: str | None = Field(None, description="system message of every conversation; null: the data's own")
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="of the chat template, for example {enable_thinking: false}"
    )
    tool: ToolLimits = Field(default_factory=ToolLimits)

    @model_validator(mode="after")
    def _free_names(self) -> Self:
        own = {"conversation", "messages", "tools", "add_generation_prompt", "tokenize"}
        if taken := own & self.chat_template_kwargs.keys():
            raise ValueError(
                f"agent.chat_template_kwargs sets {', '.join(sorted(taken))}, which the agent itself sets; remove it"
            )
        return self


class RewardConfig(Section):
    """The reward function."""

    function: str | None = Field(None, description="module:function; null: the agent returns the reward")
    args: dict[str, Any] = Field({}, description="keyword arguments for the function")
    timeout_s: float = Field(10.0, gt=0, description="seconds that one call may take")
    workers: int = Field(4, ge=1, description="processes that run a plain function; an async def has none")


class DataConfig(Section):
    """Prompts to train and evaluate on."""

    train: str = Field(description="training prompts: JSONL or parquet file, or hub dataset")
    eval: str | None = Field(None, description="held-out prompts in the same formats; null turns evaluation off")
    train_split: str = Field("train", description="split of the training hub dataset")
    eval_split: str = Field("test", description="split of the held-out hub dataset")
    shuffle: bool = Field(True, description="shuffle prompts in each epoch, with the run's seed")


class EvaluationSet(Section):
    """One named set of held-out prompts; a null field takes the value of `evaluation`."""

    data: str = Field(description="held-out prompts: JSONL or parquet file, or hub dataset")
    split: str = Field("test", description="split of the hub dataset")
    num_prompts: int | None = Field(None, ge=1, description="number of prompts, taken from the beginning")
    samples: int | None = Field(None, ge=1, description="trajectories of each prompt")
    temperature: float | None = Field(None, ge=0, description="of sampling; 0 is greedy")


class EvaluationConfig(Section):
    """Held-out evaluation, at the start, during training and at the end."""

    every: int = Field(0, ge=0, description="updates between evaluations; 0 evaluates at the start and the end only")
    num_prompts: int = Field(128, ge=1, description="number of prompts, taken from the beginning of each set")
    samples: int = Field(1, ge=1, description="trajectories of each prompt: the k of avg@k and pass@k")
    temperature: float | None = Field(None, ge=0, description="of sampling; 0: greedy, null: rollout.temperature")
    pass_threshold: float = Field(0.5, description="a trajectory passes with a reward above this value")
    sets: dict[str, EvaluationSet] = Field(
        {}, description="named sets instead of data.eval; the first ranks checkpoints"
    )

    @model_validator(mode="after")
    def _names(self) -> Self:
        for name in self.sets:
            if re.fullmatch(r"[\w.-]+", name) is None:
                raise ValueError(f"evaluation.sets: {name!r} is no name; use letters, digits, '_', '-' and '.'")
        return self


class SyncConfig(Section):
    """Weight sync from trainer to engines."""

    transport: str = Field(
        "broadcast",
        description="broadcast (a process group with the engines), disk (a folder that they load), or module:Class",
    )
    transport_args: dict[str, Any] = Field({}, description="options of a module:Class transport")
    folder: Path | None = Field(None, description="folder of transport=disk, of this run alone; null: one in output")
    bucket_mb: int = Field(1024, ge=1, description="size of one broadcast, or of one file, in MiB")
    timeout_s: float = Field(300, gt=0, description="seconds that each collective and each request of a sync may take")
    verify: bool = Field(True, description="compare checksums: of two pushes at first, later of the engines")
    probe_tokens: int = Field(16, ge=0, description="fresh tokens compared after each sync; 0 turns the probe off")
    max_probe_difference: float = Field(
        0.1, gt=0, description="mean |log-probability difference| in nats; two probes in a row above it end the run"
    )

    @model_validator(mode="after")
    def _uses_all(self) -> Self:
        own = ":" in self.transport
        if not own and self.transport not in ("broadcast", "disk"):
            raise ValueError(f"sync.transport={self.transport!r}: write broadcast, disk, or module:Class")
        if self.folder is not None and self.transport != "disk":
            raise ValueError(f"sync.folder={str(self.folder)!r} is of sync.transport=disk; set that, or remove it")
        if self.transport_args and not own:
            raise ValueError("sync.transport_args are of a module:Class in sync.transport; set that, or remove them")
        return self


class CheckpointConfig(Section):
    """Training checkpoints to resume from, and Hugging Face folders to use."""

    every: int = Field(20, ge=0, description="updates between training checkpoints; 0: only when the run ends")
    hf_every: int = Field(0, ge=0, description="updates between Hugging Face folders; 0: only when the run ends")
    keep_last: int = Field(2, ge=1, description="number of newest undamaged training checkpoints to keep")
    keep_best: int = Field(0, ge=0, description="further ones to keep: those with the best held-out reward")
    resume: Literal["auto", "never"] = Field("auto", description="auto goes on from the newest usable checkpoint")
    stop_grace_s: float = Field(300, gt=0, description="seconds to finish the update and save after an interruption")
