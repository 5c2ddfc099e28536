"""Bytes in which causal attention works on a CPU, one layer at a time: in fp32 a head at a time for each thread.

There ``megatron/ops/causal_kernel.cpp`` does it. In fp64, and where that could not be built, it goes block by block:

| numbers, of each of the n heads that are worked on together | |
|---|---|
| query, key, value; the gradients of the context, of key and of value | 6 s d |
| scores and their gradients, of the q queries of a block | 2 q s |
| a product of a block; sums on their way to key and value | q d, and d for each key but the last block's |

All heads share the q x q mask. The formula is that of ``megatron.ops.causal_blocks``.
The kernel's: query, key and gradient of the context; these transposed, and so the value and the gradients of key and
value, in rows of whole tiles; scores and their gradients of its queries.
"""

from __future__ import annotations

CACHED = 2**18
"""``megatron.ops.causal_blocks.CACHED``."""
QUERIES, TILE = 64, 16
"""``kQueries`` and ``kTile`` of ``megatron/ops/causal_kernel.cpp``."""


def queries_of_block(length: int) -> int:
    """Return the queries of a block, as ``megatron.ops.causal_blocks`` does."""
    return min(length, 64 if length <= 512 else 128)


def heads_at_once(heads: int, length: int, threads: int = 1) -> int:
    """Return how many of ``heads``, of all samples together, are worked on together."""
    most = max(1, CACHED * threads // (queries_of_block(length) * length))
    return -(-heads // -(-heads // most))


def backward_bytes(heads: int, length: int, size: int, width: int, threads: int = 1) -> int:
    """Return the bytes of the memory in which a backward works, for heads of ``size`` numbers of ``width`` bytes.

    In fp32 they are those of the kernel.

    Args:
        heads: of all samples together, on this rank.
        threads: of this rank.
    """
    if width == 4:
        return width * min(threads, heads) * kernel_numbers(length, size)
    queries = queries_of_block(length)
    added = (length - 1) // queries * queries
    of_head = 6 * length * size + 2 * queries * length + (queries + added) * size
    return width * (heads_at_once(heads, length, threads) * of_head + queries**2)


def kernel_numbers(length: int, size: int) -> int:
    """Return the numbers that a thread of the kernel works in, in a backward."""
    row = -(-length // TILE) * TILE
    return 3 * length * size + 6 * row * size + 2 * QUERIES * row
