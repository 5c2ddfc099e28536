"""Bytes in which causal attention works on a CPU, block by block: some heads at a time, one layer at a time.

| numbers, of each of the n heads that are worked on together | |
|---|---|
| query, key, value; the gradients of the context, of key and of value | 6 s d |
| scores and their gradients, of the q queries of a block | 2 q s |
| a product of a block; sums on their way to key and value | q d, and d for each key but the last block's |

All heads share the q x q mask. The formula is that of ``megatron.ops.causal_blocks``.
"""

from __future__ import annotations

BLOCK = 128
"""``megatron.ops.causal_blocks.BLOCK``."""
CACHED = 2**18
"""``megatron.ops.causal_blocks.CACHED``."""


def heads_at_once(heads: int, length: int, threads: int = 1) -> int:
    """Return how many of ``heads``, of all samples together, are worked on together."""
    most = max(1, CACHED * threads // (min(BLOCK, length) * length))
    return -(-heads // -(-heads // most))


def backward_bytes(heads: int, length: int, size: int, width: int, threads: int = 1) -> int:
    """Return the bytes of the memory in which a backward works, for heads of ``size`` numbers of ``width`` bytes.

    Args:
        heads: of all samples together, on this rank.
        threads: of this rank.
    """
    queries, added = min(BLOCK, length), (length - 1) // BLOCK * BLOCK
    of_head = 6 * length * size + 2 * queries * length + (queries + added) * size
    return width * (heads_at_once(heads, length, threads) * of_head + queries**2)
