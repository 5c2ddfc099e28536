"""Bytes that training holds: weights, gradients, optimizer, activations and logits.

16-bit weights have fp32 masters, gradients and moments (18 bytes per parameter with AdamW); others 16 or 32 in all.
SGD has no moments; Adafactor's means of rows and columns are small and not counted. ZeRO 1 cuts masters and moments
over the replicas: 6 + 12 / d bytes in 16 bits, 8 + 8 / d in 32. Its parts are whole vectors (``megatron.optim.cuts``),
so some replicas hold a row more of a weight.

Source of the activations of layers: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer
models", section 4, without scores, which a fused kernel makes once more. What else holds a number for each query and
key, T5's relative biases and the probabilities of its blocked attention on a CPU, is counted with T5's layers. Dropout
of attention on a CPU, and with --layout-independent-dropout anywhere, which keeps several such matrices, is not.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Memory:
    """Bytes that training holds on one rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


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

    def memory(self, parameters: int, activations: int, logits: int, sharers: int = 1) -> Memory:
        """Return the bytes of a rank that holds so many parameters; ``sharers`` replicas share the optimizer's."""
        return Memory(
            weights=parameters * self.width,
            gradients=parameters * self.gradient,
            optimizer=-(-parameters * self.optimizer // sharers),
            activations=activations,
            logits=logits,
        )
