"""GPT-2 as a list of layers for the pipeline engine.

Between stages travel the hidden states [s, b, h] and, with documents kept apart, segment ids [b, s]; never a mask.
"""

from __future__ import annotations

import torch

from megatron.models.common.attention import SharedMask
from megatron.models.common.language_model import Embedding
from megatron.models.common.model_args import Place, Sizes
from megatron.models.common.pipeline import DecoderPipe, FinalNormPipe, Stream, decoder_specs
from megatron.models.common.transformer import TransformerLayer
from megatron.ops.attention import document_mask
from tds.pipe import LayerSpec


class EmbeddingPipe(Embedding):
    """(tokens, position_ids[, segment_ids]) to hidden states[, segment_ids]."""

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> Stream:  # type: ignore[override]
        x = super().forward(inputs[0], inputs[1])
        return x if len(inputs) == 2 else (x, inputs[2])


class TransformerLayerPipe(TransformerLayer):
    """A layer that passes segment ids on, with the mask that all layers of its stage share."""

    def __init__(self, sizes: Sizes, place: Place, layer: int, mask: SharedMask) -> None:
        super().__init__(sizes, place, layer)
        self.mask = mask

    def forward(self, inputs: Stream) -> Stream:  # type: ignore[override]
        if isinstance(inputs, torch.Tensor):
            return super().forward(inputs)
        x, segment_ids = inputs
        return super().forward(x, self.mask.of(segment_ids)), segment_ids


def layer_specs(sizes: Sizes, place: Place) -> list[LayerSpec]:
    """Return embedding, ``num_layers`` transformer layers, final norm and head."""
    mask = SharedMask(document_mask)
    layers = [LayerSpec(TransformerLayerPipe, sizes, place, i, mask) for i in range(sizes.num_layers)]
    norm = LayerSpec(FinalNormPipe, place, sizes.hidden_size, sizes.layernorm_epsilon)
    return decoder_specs(EmbeddingPipe, layers, norm, sizes, place)


class GPT2ModelPipe(DecoderPipe):
    """GPT-2 over the pipeline stages of ``topology``; ``Args`` as of ``DecoderPipe``."""

    layer_classes = (TransformerLayerPipe,)

    def specs(self) -> list[LayerSpec]:
        return layer_specs(self.sizes, self.place)

    @property
    def entering(self) -> list[str]:
        return ["position_ids", *super().entering]
