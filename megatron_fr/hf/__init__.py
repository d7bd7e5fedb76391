"""Hugging Face folders from and to a live Megatron-Core model."""
