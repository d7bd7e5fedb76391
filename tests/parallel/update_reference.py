"""One update by transformers, plain sums and torch's AdamW: the answer that every layout has to give.

Nothing of this project's trainer or algorithm is used here: trajectories are run one at a time without padding, the
formulas are those of the design's first section, and float64 is used wherever transformers lets it through.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_fr.trajectory import Trajectory


@dataclass
class Update:
    """What one update does. Gradients are before clipping, under the names of the Hugging Face files."""

    metrics: dict[str, float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    admitted: list[bool] = field(default_factory=list)


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
        delta: float,
        temperature: float,
        failure_quantile: float,
        optimizer: Mapping[str, Any],
    ) -> Update:
        """Run one update and leave the model with its new weights."""
        self.agreeing = self.counted = 0
        mean_reward = sum(t.reward for t in trajectories) / len(trajectories)
        loss = torch.zeros((), dtype=torch.float64)
        divergences: list[float] = []
        entropies: list[float] = []
        differences: list[float] = []
        without_replay: list[float] = []
        changes: list[float] = []
        for t in trajectories:
            logprobs, entropy = self.next_token(t, temperature)
            actions = [i for i in range(len(t) - 1) if t.action_mask[i + 1]]
            log_mu = [float(t.behavior_logprobs[i + 1]) for i in actions]
            log_pi = logprobs.detach()[actions].tolist()
            entropies += entropy[actions].tolist()
            differences += [abs(a - b) for a, b in zip(log_pi, log_mu, strict=True)]
            (live,) = self.logprobs([replace(t, routed_experts=None)], temperature)
            without_replay += [abs(float(live[i]) - b) for i, b in zip(actions, log_mu, strict=True)]
            changes += [abs(a - float(live[i])) for i, a in zip(actions, log_pi, strict=True)]
            divergence = sum(map(_divergence, log_mu, log_pi)) / len(actions)
            divergences.append(divergence)
            if divergence > delta:
                continue
            advantage = t.reward - mean_reward
            kept = set(actions)
            if advantage < 0 and failure_quantile < 1:
                ranked = sorted(actions, key=lambda i: -float(entropy[i]))
                number = math.ceil(failure_quantile * len(actions))
                # A tie within rounding would let layouts choose differently, and the comparison would mean nothing.
                if number < len(ranked):
                    assert float(entropy[ranked[number - 1]] - entropy[ranked[number]]) > 2e-6
                kept = set(ranked[:number])
            part = torch.zeros((), dtype=torch.float64)
            for i, mu, pi in zip(actions, log_mu, log_pi, strict=True):
                if i in kept:
                    part = part + math.exp(pi - mu) * logprobs[i]
            loss = loss - advantage * part / len(actions) / len(trajectories)
        self.model.zero_grad()
        loss.backward()
        gradients = {name: tensor.clone() for name, tensor in self._named(lambda p: p.grad)}
        norm = self._step(optimizer)
        metrics = {
            "train/loss": float(loss.detach()),
            "train/grad_norm": norm,
            "policy/kl_mean": sum(divergences) / len(divergences),
            "policy/kl_max": max(divergences),
            "policy/admitted": sum(d <= delta for d in divergences) / len(divergences),
            "policy/entropy": sum(entropies) / len(entropies),
            "policy/logprob_diff": sum(differences) / len(differences),
        }
        if self.counted:
            metrics["policy/route_agreement"] = self.agreeing / self.counted
            metrics["policy/logprob_diff_without_replay"] = sum(without_replay) / len(without_replay)
            metrics["policy/replay_logprob_change"] = sum(changes) / len(changes)
        weights = {name: tensor.clone() for name, tensor in self._named(lambda p: p.data)}
        return Update(metrics, gradients, weights, [d <= delta for d in divergences])

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
        gates = [m for m in self.model.modules() if type(m).__name__ == "Qwen3MoeTopKRouter"]
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
        chosen = logits.softmax(-1).gather(1, forced)
        live = logits.topk(gate.top_k, dim=-1).indices
        self.counted += len(forced)
        self.agreeing += sum(set(a) == set(b) for a, b in zip(live.tolist(), forced.tolist(), strict=True))
        return logits, chosen / chosen.sum(-1, keepdim=True), forced


def _divergence(log_mu: float, log_pi: float) -> float:
    p, q = math.exp(log_mu), math.exp(log_pi)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
