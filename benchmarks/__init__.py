"""Benchmarks, each a module: ``python -m benchmarks.NAME [--quick]``, from the checkout."""
