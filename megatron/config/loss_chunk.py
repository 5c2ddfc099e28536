"""Choose the number of tokens whose logits the loss computes at once.

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
(``megatron.costs.memory``) includes it.

On CUDA, Triton kernels save the logits instead of the softmax. Computing all logits at once then takes 4 n in 16 bits,
and 2 n for each micro-batch that waits, so chunks need less memory only above n = 2.5 c + 2 h. Between the two bounds,
chunks need up to 1.5 times as much. They are used nevertheless, because the logits of a chunk are in fp32, while logits
that are computed all at once are in 16 bits.
"""

from __future__ import annotations

UNCHUNKED = 0
"""Result of ``tokens_per_chunk`` if the logits of all tokens are computed together and kept for the backward pass."""
MAX_UNCHUNKED_LOGITS = 2**22
"""Number of logits of a micro-batch, over the full vocabulary, up to which no chunks are used by default."""
CPU_CHUNK_TOKENS, DEVICE_CHUNK_TOKENS = 256, 4096
"""Default number of tokens in a chunk on a CPU and on other devices; see docs/experiments.md."""


def tokens_per_chunk(
    requested: int | None, num_tokens: int, vocab_size: int, hidden_size: int, *, is_on_cpu: bool
) -> int:
    """Return the size of the largest chunk in a micro-batch of ``num_tokens`` tokens, or ``UNCHUNKED``.

    Args:
        requested: maximum chunk size in tokens; 0 to compute all logits together, None for the default rule.
    """
    if requested is None:
        chunk = CPU_CHUNK_TOKENS if is_on_cpu else DEVICE_CHUNK_TOKENS
        is_worth_it = num_tokens * vocab_size > MAX_UNCHUNKED_LOGITS and num_tokens > chunk + hidden_size
        requested = chunk if is_worth_it else UNCHUNKED
    if requested == UNCHUNKED or num_tokens == 0:
        return UNCHUNKED
    return -(-num_tokens // -(-num_tokens // requested))  # equal chunks, as far as the number of tokens allows
