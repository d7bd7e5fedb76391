"""Rewards for untrained policies, which never solve a question: batches need a signal all the same."""

from megatron_fr.agents.contract import RewardInput


def by_length(seen: RewardInput) -> float:
    """1 for answers of an even number of characters."""
    return float(len(seen.final_text) % 2 == 0)


def broken(seen: RewardInput) -> float:
    """A user's bug."""
    raise KeyError(f"no column of {seen.prompt.id}")
