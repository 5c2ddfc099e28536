"""LLaMA as a list of layers for the pipeline engine.

Between stages travel the hidden states [s, b, h]; with documents kept apart segment ids [b, s], with positions that
begin anew in each document these [b, s], too; never a mask, nor an angle.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.config import Config
from megatron.models.common.attention import SharedMask
from megatron.models.common.language_model import WordEmbedding
from megatron.models.common.model_args import ParallelContext
from megatron.models.common.pipeline import DecoderPipe, Stream, decoder_specs, embedding_pipe, norm_pipe
from megatron.models.common.transformer import RMSNorm
from megatron.models.llama.model import LlamaLayer, LlamaModelArgs
from megatron.mpu.topology import Topology
from megatron.ops.attention import document_mask
from tds.pipe import LayerSpec


class LlamaLayerPipe(LlamaLayer):
    """A layer that passes segment ids and positions on.

    Args:
        mask: what all layers of the stage share; given, segment ids are the first beside the hidden states. Positions
            follow, if there are any.
    """

    def __init__(
        self, sizes: LlamaModelArgs, place: ParallelContext, layer: int, mask: SharedMask | None = None
    ) -> None:
        super().__init__(sizes, place, layer)
        self.mask = mask

    def forward(self, inputs: Stream) -> Stream:  # type: ignore[override]
        if isinstance(inputs, torch.Tensor):
            return super().forward(inputs)
        x, *beside = inputs
        mask = None if self.mask is None else self.mask.of(beside[0])
        positions = beside[-1] if len(beside) > (mask is not None) else None
        return super().forward(x, mask, None, positions), *beside


def layer_specs(sizes: LlamaModelArgs, place: ParallelContext, has_segments: bool = False) -> list[LayerSpec]:
    """Return embedding, ``num_layers`` transformer layers, final norm and head."""
    mask = SharedMask(document_mask) if has_segments else None
    layers = [LayerSpec(LlamaLayerPipe, sizes, place, i, mask) for i in range(sizes.num_layers)]
    norm = LayerSpec(norm_pipe(RMSNorm), place, sizes.hidden_size, sizes.layernorm_epsilon)
    return decoder_specs(embedding_pipe(WordEmbedding, 1), layers, norm, sizes, place)


class LlamaModelPipe(DecoderPipe):
    """LLaMA over the pipeline stages of ``topology``; the other ``Args`` as of ``DecoderPipe``.

    Args:
        has_positions: positions travel with the hidden states.
    """

    layer_classes = (LlamaLayerPipe,)

    def __init__(
        self,
        sizes: LlamaModelArgs,
        place: ParallelContext,
        topology: Topology,
        *,
        has_positions: bool = False,
        **others: Any,
    ) -> None:
        self.has_positions = has_positions
        super().__init__(sizes, place, topology, **others)

    @classmethod
    def beside(cls, config: Config) -> dict[str, bool]:
        return {**super().beside(config), "has_positions": config.data.reset_position_ids}

    def specs(self) -> list[LayerSpec]:
        return layer_specs(self.sizes, self.place, self.has_segments)
