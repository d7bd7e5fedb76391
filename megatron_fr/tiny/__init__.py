"""A complete Hugging Face model folder small enough for a CPU: tokenizer, chat template, weights, prompts."""

from megatron_fr.tiny.model import make_untrained
from megatron_fr.tiny.tokenizer import make_tokenizer

__all__ = ["make_tokenizer", "make_untrained"]
