"""Bytes of the head and the loss on the last stage, between a forward and its backward and while they work.

| logits | at work | kept by each micro-batch in flight |
|---|---|---|
| together | in the weights' format; in 16 bits an fp32 copy | their fp32 softmax |
| in chunks | a chunk's in fp32, of several ranks two; in 16 bits copies | two gradients |

The gradients are those of the hidden states and, in fp32, of the table. Copies are of a chunk and of
the latter. Which of the two it is: ``megatron.loss_chunks``.
"""

from __future__ import annotations

from megatron.cost.parts import Sizes, known_vocab_size
from megatron.loss_chunks import WHOLE, tokens_at_once


def loss_bytes(
    sizes: Sizes, tokens: int, tensor: int, width: int, *, forwards: int = 1, is_on_cpu: bool = False
) -> int:
    """Return the bytes that the logits of ``tokens`` tokens and their loss need on one of ``tensor`` ranks.

    Args:
        tokens: of a micro-batch.
        width: bytes of a weight.
        forwards: micro-batches that wait for their backward.
    """
    words, wide, h = -(-known_vocab_size(sizes) // tensor), max(width, 4), sizes.hidden_size
    at_once = tokens_at_once(sizes.loss_chunk_tokens, tokens, known_vocab_size(sizes), h, is_on_cpu=is_on_cpu)
    if at_once == WHOLE:
        return tokens * words * (width + (wide if width < wide else 0) + wide * forwards)
    copies = width if width < wide else 0
    at_work = words * (at_once * (wide * (2 if tensor > 1 else 1) + copies) + h * copies)
    return at_work + forwards * h * (tokens * width + words * wide)
