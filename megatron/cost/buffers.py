"""Bytes of what is on its way between ranks while a step runs.

| message | bytes on a rank |
|---|---|
| sums of gradients over the replicas, ZeRO 0 and 1 | a flat copy of weights below 32 MiB, which share buckets |
| ... ZeRO 2 and 3 | two buckets, or what there is |
| boundary of stages | one hidden state received ahead and one gradient, and one on its way out |
| sequence parallelism | the whole input of the product that is running, and its gradient |

The first is there when the last backward has freed most activations: what counts is by how much it exceeds these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.cost.memory import Memory, Zero

BUCKET_BYTES = 32 * 2**20
"""``tds.gradients.BUCKET_BYTES``, and those of ``megatron.optim``."""
CUT_GRADIENTS = 2
"""The first stage of ZeRO that sums gradients within backward."""
AHEAD = 3
"""Messages of a boundary: a hidden state and a gradient ahead, and one that leaves."""


@dataclass(frozen=True)
class Flying:
    """What of a rank is on its way.

    Args:
        small: parameters in weights that are smaller than a bucket.
        message: bytes of the hidden state that crosses a boundary of stages; 0 without a pipeline.
        gathered: bytes of an activation that sequence parallelism gathers; 0 without.
    """

    small: int = 0
    message: int = 0
    gathered: int = 0

    def placed(self, memory: Memory, gradient: int, zero: Zero) -> Memory:
        """Return ``memory`` with its buffers; ``gradient`` bytes of a parameter."""
        steady = AHEAD * self.message + 2 * self.gathered
        if zero.replicas == 1:
            return replace(memory, buffers=steady)
        copied = self.small * gradient
        if zero.stage >= CUT_GRADIENTS:
            return replace(memory, buffers=steady + min(copied, 2 * BUCKET_BYTES))
        return replace(memory, buffers=steady + max(copied - memory.activations - memory.logits, 0))
