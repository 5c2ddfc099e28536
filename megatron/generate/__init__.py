"""Tokens from a model in any layout: greedy decoding, which gives the same ones in every layout.

    from megatron.generate import greedy_t5

    rows = greedy_t5(model, sources, start_id=0, eos_id=1, max_new_tokens=64)

``model`` is this rank's module without a pipeline, or the ``tds`` engine of a pipeline; every rank of the replica makes
the call and gets all rows. Nothing is cached: each new token runs the whole model on all tokens so far.
"""

from megatron.generate.gpt2 import greedy_gpt2
from megatron.generate.t5 import greedy_t5

__all__ = ["greedy_gpt2", "greedy_t5"]
