"""A complete Hugging Face model folder small enough for a CPU: tokenizer, chat template, weights, prompts."""

from tools.tiny.model import make_untrained
from tools.tiny.tokenizer import make_tokenizer

__all__ = ["make_tokenizer", "make_untrained"]
