"""Inspect token files: their statistics, and the samples as a model sees them. This package does not import torch."""

from megatron.data.inspect.statistics import Facts, Lengths, facts_of

__all__ = ["Facts", "Lengths", "facts_of"]
