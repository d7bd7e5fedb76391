"""The trajectory that the rollout side hands to the trainer.

The trainer sees exactly the tokens that the engine saw and sampled. Row ``t`` of ``routed_experts`` is the routing used
while the model processed token ``t``. The last token is never processed, so it has no row.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from megatron_fr.errors import TrajectoryError

FinishReason = Literal["stop", "length", "env_done", "aborted"]

#: Value of ``versions`` on observation tokens, which no policy version sampled.
NO_VERSION = -1

_DTYPES: dict[str, npt.DTypeLike] = {
    "tokens": np.int32, "action_mask": np.bool_, "behavior_logprobs": np.float32, "versions": np.int32,
}  # fmt: skip
_ARRAYS = (*_DTYPES, "routed_experts")


@dataclass(frozen=True)
class Timings:
    """Seconds that a trajectory waited for a free slot, generated, and waited for tools."""

    queued_s: float = 0.0
    generating_s: float = 0.0
    tools_s: float = 0.0


def route_dtype(num_experts: int) -> np.dtype[Any]:
    """uint8 up to 256 experts, uint16 above, because routes are the bulk of a trajectory."""
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)


@dataclass(frozen=True)
class ModelLimits:
    """Limits of a valid trajectory; ``num_moe_layers``, ``top_k`` and ``num_experts`` are 0 for dense models.

    ``dense_layers`` are a mixture's layers, from 0, without experts: an engine's routes for them mean nothing.
    """

    vocab_size: int
    max_context: int
    num_moe_layers: int = 0
    top_k: int = 0
    num_experts: int = 0
    dense_layers: tuple[int, ...] = ()

    @property
    def route_dtype(self) -> np.dtype[Any]:
        return route_dtype(self.num_experts)


@dataclass
class Trajectory:
    """One finished rollout of one prompt, with ``N`` tokens over all its turns.

    Attributes:
        group_id: equal for the rollouts of one group; the trajectory's own id without groups.
        tokens: int32 ``[N]``.
        action_mask: bool ``[N]``, true on tokens that the policy sampled.
        behavior_logprobs: float32 ``[N]``, natural log in the tempered distribution; 0 where ``action_mask`` is false.
        versions: int32 ``[N]``, the policy version that sampled the token; ``NO_VERSION`` elsewhere.
        routed_experts: uint8 or uint16 ``[N - 1, num_moe_layers, top_k]``, or None.
        metadata: of the prompt, JSON, without what is too large to travel along.
        info: what the agent returned beside the conversation, bounded alike.
        route_error: why ``routed_experts`` is None although routes were asked for.
    """

    id: str
    prompt_id: str
    group_id: str
    tokens: npt.NDArray[np.int32]
    action_mask: npt.NDArray[np.bool_]
    behavior_logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    reward: float
    routed_experts: npt.NDArray[Any] | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    num_turns: int = 1
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    finish_reason: FinishReason = "stop"
    timings: Timings = field(default_factory=Timings)
    route_error: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_action_tokens(self) -> int:
        """Number of sampled tokens, ``T_i`` in the loss."""
        return int(self.action_mask.sum())

    @property
    def oldest_version(self) -> int:
        """Oldest policy version among the action tokens, from which lag is counted."""
        return int(self.versions[self.action_mask].min())

    def validate(self, limits: ModelLimits) -> None:
        """Raise TrajectoryError where a field is invalid; the message names trajectory, field and reason."""
        n = len(self.tokens)

        def require(holds: bool | np.bool_, name: str, reason: str | None) -> None:
            if not holds:
                raise TrajectoryError(f"trajectory {self.id!r} (prompt {self.prompt_id!r}): {name} {reason}")

        for name, dtype in _DTYPES.items():
            array = getattr(self, name)
            require(array.shape == (n,), name, f"has shape {array.shape}, expected ({n},)")
            require(array.dtype == dtype, name, f"has dtype {array.dtype}, expected {np.dtype(dtype)}")
        require(2 <= n <= limits.max_context, "tokens", f"has length {n}, expected 2 to {limits.max_context}")
        in_vocabulary = self.tokens.min() >= 0 and self.tokens.max() < limits.vocab_size
        require(in_vocabulary, "tokens", f"holds an id outside 0..{limits.vocab_size - 1}")
        require(self.action_mask.any(), "action_mask", "marks no action token")
        require(not self.action_mask[0], "action_mask", "marks the first token, which no token predicts")
        logprobs = self.behavior_logprobs[self.action_mask]
        require(np.isfinite(logprobs).all(), "behavior_logprobs", "holds a non-finite value on an action token")
        most = logprobs.max()
        require(most <= 1e-4, "behavior_logprobs", f"holds {most:.6g} > 0 on an action token")
        require((self.versions[self.action_mask] >= 0).all(), "versions", "is missing on an action token")
        require(math.isfinite(self.reward), "reward", f"is {self.reward}")
        reasons = get_args(FinishReason)
        require(self.finish_reason in reasons, "finish_reason", f"is {self.finish_reason!r}, expected one of {reasons}")
        fault = None if self.routed_experts is None else self.check_routes(limits)
        require(fault is None, "routed_experts", fault)

    def check_routes(self, limits: ModelLimits) -> str | None:
        """Why ``routed_experts`` cannot be replayed on this model, or None when it can."""
        routes = self.routed_experts
        if routes is None:
            return self.route_error or "is missing"
        expected = (len(self.tokens) - 1, limits.num_moe_layers, limits.top_k)
        if routes.shape != expected:
            return f"has shape {routes.shape}, expected {expected}"
        if routes.dtype not in (np.uint8, np.uint16):
            return f"has dtype {routes.dtype}, expected uint8 or uint16"
        if routes.size and int(routes.max()) >= limits.num_experts:
            return f"names expert {int(routes.max())}, the model has {limits.num_experts}"
        ordered = np.sort(routes, axis=-1)
        repeated = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
        if repeated.any():
            row, layer = np.argwhere(repeated)[0]
            return f"names an expert twice at row {row}, MoE layer {layer}"
        return None


def encode(trajectories: Sequence[Trajectory]) -> bytes:
    """Pack trajectories into one npz archive without pickles, in order."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    heads: list[dict[str, Any]] = []
    for i, t in enumerate(trajectories):
        arrays |= {f"{i}.{name}": array for name in _ARRAYS if (array := getattr(t, name)) is not None}
        heads.append({k: v for k, v in vars(t).items() if k not in _ARRAYS} | {"timings": vars(t.timings)})
    arrays["heads"] = np.frombuffer(json.dumps(heads).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def decode(payload: bytes) -> list[Trajectory]:
    """Undo :func:`encode`; TrajectoryError where the bytes are no such archive."""
    try:
        with np.load(io.BytesIO(payload), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        heads = json.loads(arrays.pop("heads").tobytes())
        trajectories = []
        for i, head in enumerate(heads):
            known = (
                head | {name: arrays.pop(f"{i}.{name}") for name in _DTYPES} | {"timings": Timings(**head["timings"])}
            )
            trajectories.append(Trajectory(**known, routed_experts=arrays.pop(f"{i}.routed_experts", None)))
        if arrays:
            raise ValueError(f"it holds unknown arrays: {', '.join(arrays)}")
    except Exception as error:  # numpy, zipfile, zlib and json raise many kinds on damaged bytes
        raise TrajectoryError(f"a payload of {len(payload)} bytes is no trajectory archive: {error}") from error
    return trajectories
