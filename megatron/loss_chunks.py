"""For how many tokens at a time the loss makes logits: one rule for training and for the estimate of its memory.

It looks at the micro-batch and the whole vocabulary, never at the layout or the schedule, so that all layouts compute
the same sums. A chunk is small on a CPU, where it shall stay in the caches, and larger on other devices, where the
gradient of the table is read and written once for each chunk.
"""

from __future__ import annotations

WHOLE = 0
"""What ``tokens_at_once`` returns where the logits of all tokens are made together and kept for backward."""
SMALL = 2**22
"""Logits of a micro-batch, over the whole vocabulary, up to which they are made together unless a flag says more."""
ON_CPU, ELSEWHERE = 256, 4096
"""Tokens of a chunk unless a flag says more; see docs/experiments.md."""


def tokens_at_once(asked: int | None, num_tokens: int, vocab_size: int, *, is_on_cpu: bool) -> int:
    """Return the tokens of the largest chunk of a micro-batch of ``num_tokens``, or WHOLE.

    Args:
        asked: tokens of a chunk at most, 0 to make all logits together, None to decide here.
    """
    if asked is None:
        asked = WHOLE if num_tokens * vocab_size <= SMALL else ON_CPU if is_on_cpu else ELSEWHERE
    if asked == WHOLE or num_tokens == 0:
        return WHOLE
    return -(-num_tokens // -(-num_tokens // asked))  # chunks of one size, as far as it divides
