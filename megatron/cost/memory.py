"""Bytes that training holds: weights, gradients, optimizer, activations and logits.

16-bit weights have fp32 masters, gradients and moments (18 bytes per parameter with AdamW); others 16 or 32 in all.
SGD has no moments; Adafactor's means of rows and columns are small and not counted. With ZeRO over d replicas, AdamW:

| bytes of a parameter | 16 bits | fp32 |
|---|---|---|
| ZeRO 0 | 2 + 4 + 12 | 4 + 4 + 8 |
| ZeRO 1 | 2 + 4 + 12 / d | 4 + 4 + 8 / d |
| ZeRO 2 | 2 + (4 + 12) / d | 4 + (4 + 8) / d |
| ZeRO 3 | (2 + 4 + 12) / d | (4 + 4 + 8) / d |
| ... and of those gathered: tables and the largest layer | 2 | 4 |
| offload of the optimizer, on the CPU | 12, or 12 / d | the same: its own copy of the weight |
| offload of the weights, on the CPU | 2 / d | 4 / d, none where the optimizer is there too |

Sums and gathers on their way are told in ``megatron.cost.buffers``. Not counted: what backward has left in a bucket
that is not full, and the gradients that a step copies to the CPU. Parts are whole vectors (``megatron.optim.cuts``), so
some replicas hold a row more of a weight; a recomputed run of several layers is gathered together.

Source of the activations of layers: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer
models", section 4, without scores, which a fused kernel makes once more. The memory in which a GPT-2's attention works
on a CPU (``megatron.cost.scratch``) counts where it is more than what its layer has let go and the logits. What else
holds a number for each query and key, T5's relative biases and the probabilities of its blocked attention on a CPU, is
counted with T5's layers. Where attention drops on a CPU, or with --layout-independent-dropout, the probabilities count
too (5 a s / h of s b h), but for T5.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Memory:
    """Bytes that training holds on one rank: ``gathered`` weights with ZeRO 3 alone, ``host`` what is offloaded,
    ``buffers`` messages on their way.

    At the start ZeRO 3 holds no more than its parts and, on the host, one weight in fp32 (``training.arriving``).
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    gathered: int = 0
    host: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device: all but ``host``."""
        states = self.weights + self.gathered + self.gradients + self.optimizer
        return states + self.activations + self.logits + self.buffers


@dataclass(frozen=True)
class Zero:
    """How ``replicas`` share what training holds, and what of it lies on the CPU."""

    stage: int = 0
    replicas: int = 1
    offload_optimizer: bool = False
    offload_parameters: bool = False

    def share(self, stage: int) -> int:
        """Return how many replicas share what is cut from ``stage`` on."""
        return self.replicas if self.stage >= stage else 1


PLAIN = Zero()


@dataclass(frozen=True)
class State:
    """Bytes of one parameter: its weight, its gradient, and what the optimizer keeps."""

    width: int
    gradient: int
    optimizer: int

    @classmethod
    def of(cls, dtype: str, optimizer: str) -> State:
        """Return the bytes for weights of ``dtype`` under the optimizer of that name."""
        width = BYTES[dtype]
        wide = max(width, 4)
        master = wide if width < 4 else 0
        return cls(width, wide, master + (2 * wide if optimizer == "adamw" else 0))

    def memory(self, parameters: int, activations: int, logits: int, zero: Zero = PLAIN, gathered: int = 0) -> Memory:
        """Return the bytes of a rank of a model part of so many ``parameters``, ``gathered`` of them at a time."""
        wide, is_cut = max(self.width, 4), zero.stage == 3
        weights = -(-parameters * self.width // zero.share(3))
        optimizer = self.optimizer
        if self.width == wide and zero.offload_optimizer != zero.offload_parameters:
            optimizer += wide  # the master cannot be the weight
        states = -(-parameters * optimizer // zero.share(1))
        cuts = is_cut and (zero.replicas > 1 or zero.offload_parameters)
        on_host = (states if zero.offload_optimizer else 0) + (weights if zero.offload_parameters else 0)
        return Memory(
            weights=0 if zero.offload_parameters else weights,
            gradients=-(-parameters * self.gradient // zero.share(2)),
            optimizer=0 if zero.offload_optimizer else states,
            activations=activations,
            logits=logits,
            gathered=gathered * self.width if cuts else 0,
            host=on_host,
        )
