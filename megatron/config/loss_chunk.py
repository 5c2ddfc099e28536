"""Number of tokens whose logits the loss computes at once.

It looks at the micro-batch and the whole vocabulary, never at the layout or the schedule, so that all layouts compute
the same sums. A chunk is small on a CPU, where it shall stay in the caches, and larger on other devices, where the
gradient of the table is read and written once for each chunk.

Chunks hold the gradient of the table, [v, h], beside logits of c tokens, in place of logits and softmax of n:

| bytes / v of one rank | together | in chunks | less from |
|---|---|---|---|
| fp32 | 8 n | 4 c + 4 h, of several ranks 8 c + 4 h | n = c + h / 2 |
| 16 bits | 10 n | 6 c + 6 h, of several ranks 10 c + 6 h | n = c + 0.6 h |
| ... for each micro-batch that waits for its backward | 4 n | 4 h | n = h |

Where ``n > c + h`` chunks hold less in each of these, and it is the rule. It leaves out the gradient of the hidden
states, n h numbers on every rank, which counts where v/t is no more than a few h; the
estimate of memory (``megatron.costs.decoder_cost``) has all.
"""

from __future__ import annotations

WHOLE = 0
"""What ``tokens_at_once`` returns where the logits of all tokens are made together and kept for backward."""
SMALL = 2**22
"""Logits of a micro-batch, over the whole vocabulary, up to which they are made together unless a flag says more."""
ON_CPU, ELSEWHERE = 256, 4096
"""Tokens of a chunk unless a flag says more; see docs/experiments.md."""


def tokens_at_once(asked: int | None, num_tokens: int, vocab_size: int, hidden_size: int, *, is_on_cpu: bool) -> int:
    """Return the tokens of the largest chunk of a micro-batch of ``num_tokens``, or WHOLE.

    Args:
        asked: tokens of a chunk at most, 0 to make all logits together, None to decide here.
    """
    if asked is None:
        chunk = ON_CPU if is_on_cpu else ELSEWHERE
        is_worth_it = num_tokens * vocab_size > SMALL and num_tokens > chunk + hidden_size
        asked = chunk if is_worth_it else WHOLE
    if asked == WHOLE or num_tokens == 0:
        return WHOLE
    return -(-num_tokens // -(-num_tokens // asked))  # chunks of one size, as far as it divides
