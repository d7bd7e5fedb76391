"""What happens between a prompt and a reward: agents and environments, chat, tools, rewards."""

from megatron_fr.agents.chat import Chat
from megatron_fr.agents.contract import Agent, Generation, Outcome, Prompt, Reward, RewardInput, TokenSession

__all__ = ["Agent", "Chat", "Generation", "Outcome", "Prompt", "Reward", "RewardInput", "TokenSession"]
