"""A token session that replays given turns; the engine's own session has its tests elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_fr.agents.contract import Generation


class ScriptedSession:
    """Each generation is the next scripted turn, cut where the token budget ends."""

    def __init__(self, turns: Sequence[Sequence[int]], budget: int = 10_000, aborts: bool = False) -> None:
        self._turns = list(turns)
        self._budget = budget
        self._aborts = aborts
        self._tokens: list[int] = []
        self.mask: list[bool] = []
        self.limits: list[int | None] = []
        self.observed: list[list[int]] = []

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    @property
    def action_tokens_left(self) -> int:
        return self._budget - sum(self.mask)

    def observe(self, token_ids: Sequence[int]) -> None:
        self.observed.append(list(token_ids))
        self._tokens += token_ids
        self.mask += [False] * len(token_ids)

    async def generate(self, *, stop_token_ids: Sequence[int], max_tokens: int | None = None) -> Generation:
        self.limits.append(max_tokens)
        limit = self.action_tokens_left if max_tokens is None else min(self.action_tokens_left, max_tokens)
        if limit <= 0:
            return Generation((), "length")
        turn = tuple(self._turns.pop(0))[:limit]
        self._tokens += turn
        self.mask += [True] * len(turn)
        if not turn or turn[-1] in stop_token_ids:
            return Generation(turn, "stop")
        return Generation(turn, "aborted" if self._aborts else "length")
