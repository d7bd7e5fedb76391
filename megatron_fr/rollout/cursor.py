"""Endless training prompts in an order that a restart repeats."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from megatron_fr.agents.contract import Prompt
from megatron_fr.errors import ConfigError


class PromptCursor:
    """Endless prompts, epoch after epoch, in an order that depends on ``seed`` and position alone.

    Args:
        prompts: at least one.
        seed: of the shuffling.
        shuffle: give each epoch its own random order; else every epoch follows the file.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int = 0, shuffle: bool = True) -> None:
        if not prompts:
            raise ConfigError("there are no prompts to draw from")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._position = 0
        self._shuffled: list[int] = []
        self._shuffled_epoch = -1

    @property
    def position(self) -> int:
        """How many prompts were taken."""
        return self._position

    @property
    def epoch(self) -> int:
        """Of the next prompt, from 0."""
        return self._position // len(self._prompts)

    @cached_property
    def order(self) -> dict[str, Any]:
        """What decides which prompt stands at which position."""
        digest = hashlib.sha256("\0".join(prompt.id for prompt in self._prompts).encode()).hexdigest()
        return {"number": len(self._prompts), "ids": digest[:16], "seed": self._seed, "shuffle": self._shuffle}

    def seek(self, position: int) -> None:
        """Go to where :attr:`position` was ``position``."""
        if position < 0:
            raise ValueError(f"position={position} is negative")
        self._position = position

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        if self._shuffled_epoch != self.epoch:
            self._shuffled_epoch = self.epoch
            self._shuffled = list(range(len(self._prompts)))
            if self._shuffle:
                random.Random(f"{self._seed}/{self.epoch}").shuffle(self._shuffled)
        prompt = self._prompts[self._shuffled[self._position % len(self._prompts)]]
        self._position += 1
        return prompt
