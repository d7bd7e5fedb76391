"""Megatron-FR: FlashREINFORCE for Mixture-of-Experts tool agents, on Megatron-Core and SGLang."""

__version__ = "0.1.0"
