"""Costs of an MPT: a decoder's, without positions and shifts, and with ALiBi's biases in memory.

| amount | bytes on a rank, in numbers of width w |
|---|---|
| biases, once for all layers of a stage | w a / t s^2 |
| biases within documents, of each micro-batch | w b a / t s^2 |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megatron.models.common.cost import Shared
from megatron.models.common.decoder_cost import DecoderCosts, dropout_costs
from megatron.models.common.memory import BYTES, Memory


@dataclass(frozen=True)
class MptCosts(DecoderCosts):
    """The costs of an MPT of ``sizes``; ``has_segments``: documents are kept apart."""

    norm_vectors: ClassVar[int] = 1
    has_positions: ClassVar[bool] = False
    has_segments: bool = False

    def shared_kept(self, samples: int, tensor: int, width: int) -> list[Shared]:
        layers = tuple(range(1, 1 + self.sizes.num_layers))
        return [Shared(samples * self._bias_bytes(tensor, width), layers)] if self.has_segments else []

    def memory_per_stage(self, bounds: Sequence[int], **how: Any) -> list[Memory]:
        """As ``Costs`` says, with the biases that a stage keeps for every micro-batch."""
        bias = self._bias_bytes(how.get("tensor", 1), BYTES[how.get("dtype", "fp32")])
        found = super().memory_per_stage(bounds, **how)
        return [replace(memory, activations=memory.activations + bias) for memory in found]

    def _bias_bytes(self, tensor: int, width: int) -> int:
        return width * self.sizes.num_attention_heads // tensor * self.seq_length**2


def costs(config: Any, is_on_cpu: bool = False) -> MptCosts:
    """Return the costs of the model of ``config``, a ``Config``; what it keeps depends on where it is trained."""
    return MptCosts(
        config.model,
        config.batch.seq_length,
        has_segments=config.data.keeps_documents_apart,
        mask_bytes=dropout_costs(config, is_on_cpu)["mask_bytes"],
        is_on_cpu=is_on_cpu,
    )
