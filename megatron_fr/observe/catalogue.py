"""Unit and meaning of every metric that a run writes; ``docs/metrics.md`` is made from it."""

from __future__ import annotations

#: Held-out metrics have the name of the training metric behind ``eval/``, or behind ``eval/NAME/`` for a named set.
EVALUATION = "eval/"

#: Name, or a prefix that ends in ``*``: unit and meaning.
METRICS: dict[str, tuple[str, str]] = {
    "update": ("updates", "number of batches consumed since the run began; the row's key"),
    "version": ("updates", "version of the weights after this update; it stands still when no step is taken"),
    "reward/mean": ("reward", "mean reward of the batch; in an evaluation avg@k, the mean over prompts"),
    "reward/pass": ("share", "share of held-out prompts with at least one trajectory that passes (pass@k)"),
    "reward/*": ("reward", "mean of a named part of the reward, over the trajectories that have it"),
    "tools/calls": ("calls", "tool calls in one trajectory, mean"),
    "tools/errors": ("calls", "failed tool calls in one trajectory, mean"),
    "tools/refused_total": ("calls", "tool calls that the sandbox itself failed to run since the service started"),
    "trajectory/truncated": ("share", "trajectories cut off by a token limit"),
    "trajectory/turns": ("turns", "assistant turns in one trajectory, mean"),
    "trajectory/tokens_p50": ("tokens", "tokens of a trajectory, prompt and tool output included: median"),
    "trajectory/tokens_p99": ("tokens", "tokens of a trajectory, prompt and tool output included: 99th percentile"),
    "trajectory/action_tokens_mean": ("tokens", "tokens that the policy sampled in one trajectory, mean"),
    "trajectory/failed": ("trajectories", "evaluated trajectories that no attempt could score"),
    "policy_lag/min": ("updates", "smallest lag in the batch: trainer's version minus the oldest of an action token"),
    "policy_lag/mean": ("updates", "mean lag of the batch's trajectories"),
    "policy_lag/max": ("updates", "largest lag in the batch; at most `rollout.max_policy_lag`"),
    "rollout/tokens_per_s": ("tokens/s", "tokens that all engines sampled since the last batch, per second"),
    "rollout/time_queued": ("share", "part of the trajectories' time in which they waited for a free slot"),
    "rollout/time_generating": ("share", "part of the trajectories' time in which engines generated"),
    "rollout/time_tools": ("share", "part of the trajectories' time in which they waited for tools"),
    "rollout/in_flight": ("trajectories", "trajectories under way when the batch was leased"),
    "rollout/queued": ("trajectories", "finished trajectories that wait, after the batch was leased"),
    "rollout/dropped_total": ("trajectories", "trajectories dropped for their lag since the run began"),
    "rollout/failed_total": ("trajectories", "rollouts that failed at every attempt since the run began"),
    "rollout/failure_rate": ("share", "of the last 256 distinct prompts, those that failed for good"),
    "rollout/failed_prompts": ("prompts", "prompts set aside because they failed for good, since the run began"),
    "rollout/refused_total": ("trajectories", "trajectories refused for invalid content since the service started"),
    "rollout/routes_missing": ("trajectories", "trajectories without usable routes, which take the live router"),
    "rollout/event_loop_delay_ms": ("ms", "longest delay of the rollout service's event loop since the last batch"),
    "trust_region/admitted": ("share", "trajectories that the trust region admits"),
    "trust_region/admitted_tokens": ("share", "action tokens that the trust region admits"),
    "trust_region/seq_kl_mean": ("nats/token", "mean over trajectories of the sequence's mean Bernoulli KL"),
    "trust_region/seq_kl_max": ("nats/token", "largest sequence KL of the batch"),
    "policy/entropy": ("nats", "entropy of the tempered policy, mean over action tokens"),
    "policy/ratio_mean": ("ratio", "importance ratio before truncation or clipping, mean over admitted tokens"),
    "policy/ratio_max": ("ratio", "largest importance ratio of an admitted token"),
    "policy/ratio_clamped": ("share", "action tokens whose log-ratio was clamped against overflow"),
    "policy/clipped": ("share", "action tokens on which a clip or truncation was active"),
    "policy/train_rollout_logprob_diff": ("nats", "mean absolute log-probability difference, trainer and engines"),
    "policy/train_rollout_logprob_diff_without_replay":
        ("nats", "the same with the live router, before the same update; every `train.replay_check_every` updates"),
    "policy/replay_logprob_change": ("nats", "mean absolute change by routing replay, at the same updates"),
    "policy/route_agreement": ("share", "(token, layer) pairs for which the live router chooses the replayed experts"),
    "loss/*": ("own", "statistic that a loss of your own returns, summed over micro-batches and ranks"),
    "train/loss": ("loss", "objective of the update, over all ranks"),
    "train/grad_norm": ("norm", "global gradient norm before clipping"),
    "train/lr": ("rate", "learning rate of the update"),
    "train/stepped": ("0 or 1", "1 when the optimizer took a step"),
    "train/tokens_per_s": ("tokens/s", "tokens of the batch over the update's time"),
    "train/moe_aux_loss": ("loss", "experts' load-balancing loss, 1 at even load; mean over layers and micro-batches"),
    "sync/seconds": ("s", "time of the weight sync"),
    "sync/verify_s": ("s", "part of the sync that checks the engines' weights, with the first sync's second push"),
    "sync/bytes": ("bytes", "weights sent to each engine"),
    "sync/probe_logprob_diff": ("nats", "mean absolute log-probability difference of fresh tokens after the sync"),
    "sync/probe_version": ("version", "version of the weights that `sync/probe_logprob_diff` is of"),
    "time/update": ("s", "time of the whole update, without evaluation and checkpoints"),
    "time/wait": ("s", "time in which the trainer waited for a batch"),
    "time/forward_backward": ("s", "time of forward, loss and backward"),
    "time/optimizer": ("s", "time of the optimizer step"),
    "time/sync": ("s", "time of the weight sync, 0 without a step"),
    "time/probe": ("s", "time in which the update waited for the probe of fresh tokens"),
    "time/replay_check": ("s", "time of the extra forward with the live router"),
    "time/other": ("s", "what is left of `time/update`: lease, commit and layout of the batch"),
    "time/evaluation": ("s", "time of the evaluation after the update"),
    "time/checkpoint": ("s", "time in which checkpoints and folders held up the trainer since the update before"),
    "time/trainer_idle": ("share", "`time/wait` over `time/update`"),
    "metrics/non_finite": ("values", "values of this row that are not finite and are written as null"),
}  # fmt: skip


def find_metric(name: str) -> tuple[str, str] | None:
    """Unit and meaning of a metric, or None for a name that the catalogue does not have."""
    if name.startswith(EVALUATION):
        rest = name.removeprefix(EVALUATION)
        return find_metric(rest) or find_metric(rest.partition("/")[2])
    return METRICS.get(name) or METRICS.get(f"{name.partition('/')[0]}/*")
