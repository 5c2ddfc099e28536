"""Inspect token files: their statistics, and the samples as a model sees them. This package does not import torch."""

from megatron.data.inspect.statistics import Lengths, TokenFileStats, collect_stats

__all__ = ["Lengths", "TokenFileStats", "collect_stats"]
