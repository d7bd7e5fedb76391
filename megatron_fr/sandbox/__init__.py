"""Runs code that a model wrote: a warm interpreter inside ``bwrap`` forks one isolated process per call."""

from megatron_fr.sandbox.result import CodeResult as CodeResult
from megatron_fr.sandbox.sandbox import Sandbox as Sandbox
