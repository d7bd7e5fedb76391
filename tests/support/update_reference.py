"""One update by transformers, plain sums and torch's AdamW: the answer that every layout has to give.

Nothing of this project's trainer or algorithm is used here: trajectories are run one at a time without padding, the
formulas are those of the design's first section, and float64 is used wherever transformers lets it through.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_fr.trajectory import Trajectory

#: How the names of what is never trained end.
UNTRAINED = "e_score_correction_bias"


@dataclass(frozen=True)
class Decision:
    """On one trajectory; ``sequence_kl`` in nats."""

    sequence_kl: float
    admitted: bool


@dataclass
class Update:
    """What one update does.

    Attributes:
        gradients: before clipping, under the names of the Hugging Face files.
        decisions: by the trajectory's number of action tokens, of which no two have the same.
    """

    metrics: dict[str, float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    decisions: dict[int, Decision]


class Reference:
    """transformers' model of a folder, with experts forced where a trajectory has routes."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, experts_implementation="eager"
        ).eval()
        # transformers gives the padding token's embedding no gradient; here it is a token like any other.
        self.model.get_input_embeddings().padding_idx = None
        self.agreeing = self.counted = 0
        #: The routers, layer by layer.
        self.gates = [
            m for m in self.model.modules() if type(m).__name__ in ("Qwen3MoeTopKRouter", "Glm4MoeTopkRouter")
        ]

    def next_token(self, trajectory: Trajectory, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropy float64 ``[N - 1]`` of the tempered distribution at each next token."""
        tokens = torch.from_numpy(trajectory.tokens.astype(np.int64))
        with self._forced(trajectory.routed_experts):
            logits = self.model(tokens[None, :-1]).logits[0].double() / temperature
        distribution = logits.log_softmax(-1)
        entropy = -(distribution.exp() * distribution).sum(-1)
        return distribution.gather(1, tokens[1:, None]).squeeze(1), entropy.detach()

    def logprobs(self, trajectories: Sequence[Trajectory], temperature: float) -> list[np.ndarray]:
        """Of each trajectory's own next tokens, for the making of behavior log-probabilities."""
        with torch.no_grad():
            return [self.next_token(t, temperature)[0].numpy() for t in trajectories]

    def update(
        self,
        trajectories: Sequence[Trajectory],
        *,
        algorithm: Mapping[str, Any],
        temperature: float,
        optimizer: Mapping[str, Any],
    ) -> Update:
        """Run one update and leave the model with its new weights."""
        self.agreeing = self.counted = 0
        live = self.logprobs([replace(t, routed_experts=None) for t in trajectories], temperature)
        advantages = _advantages(trajectories, algorithm)
        tokens = [_Tokens.of(t, *self.next_token(t, temperature)) for t in trajectories]
        number = sum(len(t.log_mu) for t in tokens)
        loss = torch.zeros((), dtype=torch.float64)
        decisions: dict[int, Decision] = {}
        ratios: list[float] = []
        admitted_tokens = clipped = 0
        for t, advantage in zip(tokens, advantages, strict=True):
            grpo = algorithm["name"] == "grpo"
            part = _grpo(t, advantage, algorithm) if grpo else _flash_reinforce(t, advantage, algorithm)
            flat = algorithm.get("reduction", "token_mean" if grpo else "sample_mean") == "token_mean"
            loss = loss - part.objective / (number if flat else len(t.log_mu) * len(tokens))
            decisions[len(t.log_mu)] = Decision(t.sequence_kl, part.admitted)
            ratios += part.ratios
            admitted_tokens += len(part.ratios)
            clipped += part.clipped
        self.model.zero_grad()
        loss.backward()
        gradients = {name: tensor.clone() for name, tensor in self._named(lambda p: p.grad)}
        norm = self._step(optimizer)
        divergences = [t.sequence_kl for t in tokens]
        metrics = {
            "train/loss": float(loss.detach()),
            "train/grad_norm": norm,
            "trust_region/seq_kl_mean": sum(divergences) / len(divergences),
            "trust_region/seq_kl_max": max(divergences),
            "trust_region/admitted": sum(d.admitted for d in decisions.values()) / len(decisions),
            "trust_region/admitted_tokens": admitted_tokens / number,
            "policy/ratio_mean": sum(ratios) / len(ratios),
            "policy/ratio_max": max(ratios),
            "policy/clipped": clipped / number,
            "policy/entropy": sum(sum(t.entropy) for t in tokens) / number,
            "policy/train_rollout_logprob_diff": sum(
                abs(a - b) for t in tokens for a, b in zip(t.pi, t.log_mu, strict=True)
            )
            / number,
        }
        if algorithm["name"] == "grpo":  # no gate to report of
            del metrics["trust_region/admitted_tokens"]
        if algorithm["name"] == "grpo" or algorithm.get("admission") == "token":
            del metrics["trust_region/admitted"]
        if self.counted:
            metrics["policy/route_agreement"] = self.agreeing / self.counted
            # What replay changes.
            without = [v[t.action_mask[1:]] for v, t in zip(live, trajectories, strict=True)]
            pairs = list(zip(without, tokens, strict=True))
            metrics["policy/train_rollout_logprob_diff_without_replay"] = (
                sum(abs(v - t.log_mu).sum() for v, t in pairs) / number
            )
            metrics["policy/replay_logprob_change"] = sum(abs(v - t.pi).sum() for v, t in pairs) / number
        weights = {name: tensor.clone() for name, tensor in self._named(lambda p: p.data)}
        # No update moves these.
        weights |= {name: buffer for name, buffer in self.model.named_buffers() if name.endswith(UNTRAINED)}
        return Update(metrics, gradients, weights, decisions)

    def router_probabilities(self, trajectories: Sequence[Trajectory]) -> dict[int, list[torch.Tensor]]:
        """What each router thinks of each trajectory's tokens: by number of action tokens, a tensor a layer.

        Returns:
            float64 ``[N - 1, experts]`` with gradient, softmax over all experts.
        """
        gates = self.gates
        seen: list[torch.Tensor] = []
        hooks = [gate.register_forward_hook(lambda _gate, _inputs, out: seen.append(out[0])) for gate in gates]
        found: dict[int, list[torch.Tensor]] = {}
        for t in trajectories:
            seen.clear()
            self.next_token(t, 1.0)
            assert len(seen) == len(gates)
            found[t.num_action_tokens] = [logits.softmax(-1) for logits in seen]
        for hook in hooks:
            hook.remove()
        return found

    def gradients_of(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """Under the names of the files; the graph is kept."""
        self.model.zero_grad()
        loss.backward(retain_graph=True)
        return {n: t.clone() for n, t in self._named(lambda p: torch.zeros_like(p) if p.grad is None else p.grad)}

    def _step(self, settings: Mapping[str, Any]) -> float:
        """Clip, then AdamW; parameters of one dimension (norms, biases) do not decay, as Megatron groups them."""
        parameters = list(self.model.parameters())
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in parameters))
        assert norm > settings["clip_grad"], "clipping is to be part of the test"
        for p in parameters:
            p.grad.mul_(settings["clip_grad"] / (norm + 1e-6))
        decaying = [p for p in parameters if p.ndim > 1]
        rest = [p for p in parameters if p.ndim == 1]
        torch.optim.AdamW(
            [{"params": decaying}, {"params": rest, "weight_decay": 0.0}],
            lr=settings["lr"],
            eps=settings["eps"],
            betas=(0.9, settings["beta2"]),
            weight_decay=settings["weight_decay"],
        ).step()
        return norm

    def _named(self, of: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors under the files' names: experts are fused in memory."""
        for name, parameter in self.model.named_parameters():
            tensor = of(parameter).detach()
            if name.endswith("experts.gate_up_proj"):
                for expert, fused in enumerate(tensor):
                    prefix = name.replace("gate_up_proj", str(expert))
                    for part, half in zip(("gate_proj", "up_proj"), fused.chunk(2), strict=True):
                        yield f"{prefix}.{part}.weight", half
            elif name.endswith("experts.down_proj"):
                for expert, down in enumerate(tensor):
                    yield f"{name.replace('down_proj', str(expert))}.down_proj.weight", down
            else:
                yield name, tensor

    @contextlib.contextmanager
    def _forced(self, routes: np.ndarray | None) -> Iterator[None]:
        """Give every router of the model its layer's experts; probabilities stay the live weights'."""
        gates = self.gates
        if routes is None or not gates:
            yield
            return
        assert len(gates) == routes.shape[1]
        for layer, gate in enumerate(gates):
            forced = torch.from_numpy(routes[:, layer].astype(np.int64))
            gate.forward = lambda hidden, gate=gate, forced=forced: self._route(gate, hidden, forced)
        try:
            yield
        finally:
            for gate in gates:
                del gate.forward

    def _route(self, gate: Any, hidden: torch.Tensor, forced: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = hidden.reshape(-1, gate.hidden_dim) @ gate.weight.T
        sigmoid = type(gate).__name__ == "Glm4MoeTopkRouter"
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        chosen = scores.gather(1, forced)
        live = (scores + gate.e_score_correction_bias if sigmoid else logits).topk(gate.top_k, dim=-1).indices
        self.counted += len(forced)
        self.agreeing += sum(set(a) == set(b) for a, b in zip(live.tolist(), forced.tolist(), strict=True))
        scale = gate.routed_scaling_factor if sigmoid else 1.0
        return logits, scale * chosen / chosen.sum(-1, keepdim=True), forced


@dataclass
class _Tokens:
    """The action tokens of a trajectory, float64; ``log_pi`` with gradient, ``pi`` its values."""

    log_pi: torch.Tensor
    pi: list[float]
    log_mu: list[float]
    entropy: list[float]
    reward: float

    @classmethod
    def of(cls, trajectory: Trajectory, logprobs: torch.Tensor, entropy: torch.Tensor) -> _Tokens:
        actions = [i for i in range(len(trajectory) - 1) if trajectory.action_mask[i + 1]]
        log_mu = [float(trajectory.behavior_logprobs[i + 1]) for i in actions]
        log_pi = logprobs[actions]
        return cls(log_pi, log_pi.tolist(), log_mu, entropy[actions].tolist(), trajectory.reward)

    @property
    def divergences(self) -> list[float]:
        return list(map(_divergence, self.log_mu, self.pi))

    @property
    def sequence_kl(self) -> float:
        return sum(self.divergences) / len(self.log_mu)


@dataclass
class _Part:
    """One trajectory's sum over tokens, before any denominator, and what became of its tokens."""

    objective: torch.Tensor
    admitted: bool
    ratios: list[float]  # of admitted tokens, before truncation or clipping
    clipped: int


def _advantages(trajectories: Sequence[Trajectory], algorithm: Mapping[str, Any]) -> list[float]:
    rewards = [t.reward for t in trajectories]
    total, number = sum(rewards), len(rewards)
    if algorithm["name"] == "grpo":
        groups: dict[str, list[float]] = {}
        for t in trajectories:
            groups.setdefault(t.group_id, []).append(t.reward)
        assert {len(group) for group in groups.values()} == {algorithm["group_size"]}
        return [
            (t.reward - statistics.mean(groups[t.group_id])) / (statistics.stdev(groups[t.group_id]) + 1e-6)
            for t in trajectories
        ]
    if algorithm.get("advantage") == "leave_one_out":
        return [r - (total - r) / (number - 1) for r in rewards]
    return [r - total / number for r in rewards]


def _flash_reinforce(tokens: _Tokens, advantage: float, algorithm: Mapping[str, Any]) -> _Part:
    delta, number = algorithm["delta"], len(tokens.log_mu)
    admission, importance = algorithm.get("admission", "sequence"), algorithm.get("importance", "token")
    compared = tokens.divergences if admission == "token" else [tokens.sequence_kl]
    _assert_clear(compared, delta)
    admitted = admission == "token" or tokens.sequence_kl <= delta
    within = [admitted and (admission != "token" or d <= delta) for d in tokens.divergences]
    kept = set(range(number))
    if tokens.reward <= algorithm.get("failure_threshold", 0) and algorithm["failure_token_quantile"] < 1:
        ranked = sorted(range(number), key=lambda i: -tokens.entropy[i])
        count = math.ceil(algorithm["failure_token_quantile"] * number)
        if admitted and count < number:
            assert tokens.entropy[ranked[count - 1]] - tokens.entropy[ranked[count]] > 2e-6, "a tie"
        kept = set(ranked[:count])
    objective = torch.zeros((), dtype=torch.float64)
    ratios: list[float] = []
    clipped = 0
    for i in range(number):
        if not within[i]:
            continue
        ratio = weight = math.exp(tokens.pi[i] - tokens.log_mu[i])
        ratios.append(ratio)
        if importance == "truncated":
            _assert_clear([ratio], algorithm["truncation"])
            weight = min(ratio, algorithm["truncation"])
            clipped += ratio > algorithm["truncation"]
        if i in kept:
            objective = objective + advantage * weight * tokens.log_pi[i]
    return _Part(objective, admitted, ratios, clipped)


def _grpo(tokens: _Tokens, advantage: float, algorithm: Mapping[str, Any]) -> _Part:
    low, high = 1 - algorithm["clip_low"], 1 + algorithm["clip_high"]
    objective = torch.zeros((), dtype=torch.float64)
    ratios: list[float] = []
    clipped = 0
    for log_pi, old in zip(tokens.log_pi, tokens.pi, strict=True):  # one step: its own policy is the one before
        ratio = (log_pi - old).exp()
        value = float(ratio.detach())
        _assert_clear([value], low)
        _assert_clear([value], high)
        ratios.append(value)
        bounded = min(max(value, low), high) * advantage
        if bounded < value * advantage:
            clipped += 1
            objective = objective + bounded
        else:
            objective = objective + ratio * advantage
    return _Part(objective, True, ratios, clipped)


def _assert_clear(values: Sequence[float], threshold: float) -> None:
    """A value within rounding of a threshold would let layouts decide differently: nothing to compare."""
    assert all(abs(value / threshold - 1) > 1e-4 for value in values), "too close to a threshold; take another seed"


def _divergence(log_mu: float, log_pi: float) -> float:
    p, q = math.exp(log_mu), math.exp(log_pi)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
