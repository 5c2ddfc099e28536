"""Number of tokens whose logits the loss computes at once.

The chunk size depends on the micro-batch and the full vocabulary, never on the layout or the schedule, so that all
layouts compute the same sums. Chunks are small on a CPU, to stay in the caches, and larger on other devices, where the
gradient of the embedding table is read and written once per chunk.

With chunks, memory holds the gradient of the table, [v, h], and the logits of c tokens, instead of the logits and the
softmax of n tokens:

| bytes / v on one rank | all at once | in chunks | chunks need less memory above |
|---|---|---|---|
| fp32 | 8 n | 4 c + 4 h, on several ranks 8 c + 4 h | n = c + h / 2 |
| 16 bits | 10 n | 6 c + 6 h, on several ranks 10 c + 6 h | n = c + 0.6 h |
| ... for each micro-batch that waits for its backward pass | 4 n | 4 h | n = h |

The rule is ``n > c + h``: chunks then need less memory in each of these cases. The rule ignores the gradient of the
hidden states, n h elements on every rank, which matters if v/t is at most a few times h. The memory estimate
(``megatron.costs.decoder_cost``) includes it.
"""

from __future__ import annotations

WHOLE = 0
"""Result of ``tokens_at_once`` if the logits of all tokens are computed together and kept for the backward pass."""
SMALL = 2**22
"""Number of logits of a micro-batch, over the full vocabulary, up to which no chunks are used by default."""
ON_CPU, ELSEWHERE = 256, 4096
"""Default number of tokens in a chunk on a CPU and on other devices; see docs/experiments.md."""


def tokens_at_once(asked: int | None, num_tokens: int, vocab_size: int, hidden_size: int, *, is_on_cpu: bool) -> int:
    """Return the number of tokens in the largest chunk of a micro-batch of ``num_tokens``, or WHOLE.

    Args:
        asked: maximum number of tokens in a chunk; 0 to compute all logits together, None for the default rule.
    """
    if asked is None:
        chunk = ON_CPU if is_on_cpu else ELSEWHERE
        is_worth_it = num_tokens * vocab_size > SMALL and num_tokens > chunk + hidden_size
        asked = chunk if is_worth_it else WHOLE
    if asked == WHOLE or num_tokens == 0:
        return WHOLE
    return -(-num_tokens // -(-num_tokens // asked))  # equal chunks, as far as the number of tokens allows
