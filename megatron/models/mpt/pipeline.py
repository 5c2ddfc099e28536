"""MPT as a list of layers for the pipeline engine.

Between stages travel the hidden states [s, b, h] and, with documents kept apart, segment ids [b, s]; never a bias. Each
stage makes those of its own heads, once for all of its layers.
"""

from __future__ import annotations

import torch

from megatron.models.common.language_model import WordEmbedding
from megatron.models.common.model_args import ParallelContext
from megatron.models.common.pipeline import DecoderPipe, Stream, decoder_specs, embedding_pipe, norm_pipe
from megatron.models.common.transformer import LayerNorm
from megatron.models.mpt.model import AlibiBias, MptLayer, MptModelArgs
from tds.pipe import LayerSpec


class MptLayerPipe(MptLayer):
    """A layer that passes segment ids on, with the biases that all layers of its stage share."""

    def __init__(self, sizes: MptModelArgs, place: ParallelContext, layer: int, alibi: AlibiBias) -> None:
        super().__init__(sizes, place, layer)
        self.alibi = alibi

    def forward(self, inputs: Stream) -> Stream:  # type: ignore[override]
        if isinstance(inputs, torch.Tensor):
            return super().forward(inputs, self.alibi.for_hidden(inputs))
        x, segment_ids = inputs
        return super().forward(x, self.alibi.for_hidden(x, segment_ids)), segment_ids


def layer_specs(sizes: MptModelArgs, place: ParallelContext) -> list[LayerSpec]:
    """Return embedding, ``num_layers`` transformer layers, final norm and head."""
    alibi = AlibiBias(sizes, place)
    layers = [LayerSpec(MptLayerPipe, sizes, place, i, alibi) for i in range(sizes.num_layers)]
    norm = LayerSpec(norm_pipe(LayerNorm), place, sizes.hidden_size, sizes.layernorm_epsilon, bias=False)
    return decoder_specs(embedding_pipe(WordEmbedding, 1), layers, norm, sizes, place)


class MptModelPipe(DecoderPipe):
    """MPT over the pipeline stages of ``topology``; ``Args`` as of ``DecoderPipe``."""

    layer_classes = (MptLayerPipe,)

    def specs(self) -> list[LayerSpec]:
        return layer_specs(self.sizes, self.place)
