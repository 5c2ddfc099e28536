"""Looking at token files: what is in them, and what a model sees of them.

``sample`` and ``view`` need torch, so they are imported where samples are shown, not here.
"""

from megatron.data.inspect.statistics import Facts, Lengths, facts_of

__all__ = ["Facts", "Lengths", "facts_of"]
