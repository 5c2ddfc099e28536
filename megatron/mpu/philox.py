"""Philox-4x32-10 on torch tensors: stateless random words from a counter and a key.

Ten rounds transform four 32-bit counter words and two key words into four random words. Words are stored in int64
tensors, so that a product of two words fits. The bits are the same on every device.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 4.3.
"""

from __future__ import annotations

import torch

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: int) -> Words:
    """Compute four random words for each counter.

    The counter words may have different shapes. They are broadcast against each other as late as the rounds allow, so
    that a counter of coordinate vectors costs less than a materialized one.

    Shapes:
        counter 4 x int64 tensors of words, 0 to 2**32 - 1, that broadcast to [...]
        output  4 x int64 [...]

    Args:
        key: 64 bits, the first word in the low half.
    """
    a, b, c, d = counter
    first, second = key & WORD, key >> 32
    for _ in range(ROUNDS):
        even, odd = a * MULTIPLIERS[0], c * MULTIPLIERS[1]  # modulo 2**64: the bits are correct even if int64 overflows
        a, b, c, d = _mix(odd, b, first), odd, _mix(even, d, second), even
        first, second = (first + KEY_STEPS[0]) & WORD, (second + KEY_STEPS[1]) & WORD
    return a, b & WORD, c, d & WORD


def _mix(product: torch.Tensor, word: torch.Tensor, key: int) -> torch.Tensor:
    """XOR ``key``, the upper half of ``product`` and the lower half of ``word``."""
    mixed = (product >> 32) ^ word
    mixed ^= key
    mixed &= WORD
    return mixed
