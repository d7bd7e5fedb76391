"""Hugging Face folders and Megatron-Core models: one table of rules per family, for loading, saving and weight sync."""

from megatron_fr.bridge.export import hf_tensor_specs, iter_hf_tensors
from megatron_fr.bridge.folder import read_hf_config, resolve_folder
from megatron_fr.bridge.load import load_hf_weights
from megatron_fr.bridge.registry import supported_architectures
from megatron_fr.bridge.save import save_hf_folder
from megatron_fr.bridge.tensor_file import TensorSpec

__all__ = [
    "TensorSpec",
    "hf_tensor_specs",
    "iter_hf_tensors",
    "load_hf_weights",
    "read_hf_config",
    "resolve_folder",
    "save_hf_folder",
    "supported_architectures",
]
