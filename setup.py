"""Packaging of megatron-fr. Exact pins live in launch/constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = next(
    line.split('"')[1] for line in (ROOT / "megatron_fr/__init__.py").read_text().splitlines() if "__version__" in line
)

setup(
    name="megatron-fr",
    version=VERSION,
    description="FlashREINFORCE for Mixture-of-Experts tool agents, on Megatron-Core and SGLang",
    license="Apache-2.0",
    packages=find_packages(include=["megatron_fr", "megatron_fr.*"]),
    python_requires=">=3.12",
    install_requires=[
        "aiohttp",
        "httpx",
        "megatron-core>=0.19",
        "numpy",
        "pebble",
        "psutil",
        "pyarrow",
        "pydantic>=2",
        "pyyaml",
        "safetensors",
        "sglang>=0.5.23",
        "tensorboard",
        "torch",
        "transformers",
    ],
    extras_require={
        "mpi": ["mpi4py"],
        "plot": ["matplotlib"],
        "quantize": ["nvidia-modelopt", "pulp==3.1.1"],  # nvidia-modelopt breaks with later pulp
        "gpu": ["transformer-engine[pytorch]"],
        "test": ["import-linter", "mypy", "pytest", "ruff", "types-PyYAML", "types-psutil"],
    },
    entry_points={
        "console_scripts": ["megatron-fr = megatron_fr.cli.__main__:main"],
        "sglang.srt.platforms": ["megatron_fr_cpu = megatron_fr.engines.cpu_platform:platform"],
        "sglang.srt.plugins": ["megatron_fr_cpu_hooks = megatron_fr.engines.cpu_platform:register_hooks"],
    },
)
