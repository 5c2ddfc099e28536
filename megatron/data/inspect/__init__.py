"""Looking at token files: what is in them, and what a model sees of them. Nothing here imports torch."""

from megatron.data.inspect.statistics import Facts, Lengths, facts_of

__all__ = ["Facts", "Lengths", "facts_of"]
