"""Endless training prompts in an order that a restart repeats."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from megatron_fr.agents.contract import Prompt
from megatron_fr.errors import ConfigError, RolloutEnded


class PromptCursor:
    """Prompts epoch after epoch, each in a random order of its own or, without ``shuffle``, in the file's.

    The order depends on ``seed`` and :attr:`position`, the number of prompts taken, alone. :attr:`order` tells what
    decides it. Prompts whose ids are in ``skipped``, which may grow, are passed over.
    """

    def __init__(
        self, prompts: Sequence[Prompt], seed: int = 0, shuffle: bool = True, skipped: Collection[str] = ()
    ) -> None:
        if not prompts:
            raise ConfigError("there are no prompts to draw from")
        self._prompts, self._skipped = prompts, skipped
        self._shuffled: list[Prompt] = []
        self._shuffled_epoch = -1
        ids, content = hashlib.sha256(), hashlib.sha256()
        for prompt in prompts:
            ids.update(f"{prompt.id}\0".encode(errors="surrogatepass"))
            held = prompt.messages, prompt.answer, prompt.metadata
            content.update(json.dumps(held, sort_keys=True, default=repr).encode())
        self.order: dict[str, Any] = {
            "number": len(prompts),
            "ids": ids.hexdigest()[:16],
            "content": content.hexdigest()[:16],
            "seed": seed,
            "shuffle": shuffle,
        }
        self.position = 0

    def seek(self, position: int) -> None:
        """Go to where :attr:`position` was ``position``."""
        if position < 0:
            raise ValueError(f"position={position} is negative")
        self.position = position

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        for _ in range(2 * len(self._prompts)):  # what is left of this epoch, and a whole one
            epoch, index = divmod(self.position, len(self._prompts))
            if self._shuffled_epoch != epoch:
                self._shuffled_epoch, self._shuffled = epoch, list(self._prompts)
                if self.order["shuffle"]:
                    random.Random(f"{self.order['seed']}/{epoch}").shuffle(self._shuffled)
            self.position += 1
            if (prompt := self._shuffled[index]).id not in self._skipped:
                return prompt
        raise RolloutEnded(f"all {len(self._prompts)} prompts of data.train failed and were set aside")
