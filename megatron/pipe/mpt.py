"""MPT as a list of layers for the pipeline engine.

Between stages travel the hidden states [s, b, h] and, with documents kept apart, segment ids [b, s]; never a bias. Each
stage makes those of its own heads, once for all of its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.model.alibi import AlibiBias
from megatron.model.embedding import WordEmbedding
from megatron.model.head import Head, logits_of
from megatron.model.mpt import MptLayer, mpt_loss
from megatron.model.norm import LayerNorm
from megatron.model.sizes import MptSizes, Place
from megatron.mpu.topology import Topology
from megatron.pipe.gpt2 import Stream, TiedTable
from megatron.pipe.recompute import stage_recompute
from megatron.pipe.topology import pipe_topology
from tds.loss import Weighted
from tds.pipe import LayerSpec, PipelineModule, TiedLayerSpec


class EmbeddingPipe(WordEmbedding):
    """Tokens or (tokens[, segment_ids]) to hidden states[, segment_ids]."""

    def forward(self, inputs: torch.Tensor | tuple[torch.Tensor, ...]) -> Stream:  # type: ignore[override]
        if isinstance(inputs, torch.Tensor):
            return super().forward(inputs)
        x = super().forward(inputs[0])
        return x if len(inputs) == 1 else (x, inputs[1])


class MptLayerPipe(MptLayer):
    """A layer that passes segment ids on, with the biases that all layers of its stage share."""

    def __init__(self, sizes: MptSizes, place: Place, layer: int, alibi: AlibiBias) -> None:
        super().__init__(sizes, place, layer)
        self.alibi = alibi

    def forward(self, inputs: Stream) -> Stream:  # type: ignore[override]
        if isinstance(inputs, torch.Tensor):
            return super().forward(inputs, self.alibi.for_hidden(inputs))
        x, segment_ids = inputs
        return super().forward(x, self.alibi.for_hidden(x, segment_ids)), segment_ids


class FinalNormPipe(LayerNorm):
    """The last norm; segment ids end here."""

    def forward(self, inputs: Stream) -> torch.Tensor:
        return super().forward(inputs if isinstance(inputs, torch.Tensor) else inputs[0])


def _tied_head(place: Place, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return logits_of(x, module.word.weight, place.group)  # type: ignore[union-attr, arg-type]


def layer_specs(sizes: MptSizes, place: Place) -> list[LayerSpec]:
    """Return embedding, ``num_layers`` transformer layers, final norm and head."""
    alibi = AlibiBias(sizes, place)
    layers = [LayerSpec(MptLayerPipe, sizes, place, i, alibi) for i in range(sizes.num_layers)]
    norm = LayerSpec(FinalNormPipe, sizes.hidden_size, sizes.layernorm_epsilon, bias=False)
    if sizes.untie_embeddings:
        return [LayerSpec(EmbeddingPipe, sizes, place), *layers, norm, LayerSpec(Head, sizes, place)]
    first = TiedLayerSpec("embedding", EmbeddingPipe, sizes, place, tied_weight_attr="word.weight")
    head = partial(_tied_head, place)
    last = TiedLayerSpec("embedding", TiedTable, sizes, place, forward_fn=head, tied_weight_attr="word.weight")
    return [first, *layers, norm, last]


def random_batch(vocab_size: int, shape: tuple[int, int], has_segments: bool) -> tuple[Any, Any]:
    """Return (inputs, labels) of a micro-batch of random tokens, the same on every rank.

    Shapes:
        each tensor [b, s], by ``shape``
    """
    tokens = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0))
    segments = (torch.zeros(shape, dtype=torch.int32),) if has_segments else ()
    return (tokens, *segments), (tokens.roll(-1, dims=1), torch.ones(shape))


class MptModelPipe(PipelineModule):
    """MPT over the pipeline stages of ``topology``; ``Args`` as of ``GPT2ModelPipe``."""

    loss_weighting = "tokens"  # for the start table

    def __init__(
        self,
        sizes: MptSizes,
        place: Place,
        topology: Topology,
        *,
        partition: str | list[int] = "parameters",
        chunks: int = 1,
        has_segments: bool = False,
        probe: tuple[int, int] | None = None,
    ) -> None:
        self.sizes, self.place, self.has_segments = sizes, place, has_segments
        profile = {} if probe is None else {"profile_batch": random_batch(sizes.vocab_size, probe, has_segments)}
        recompute = stage_recompute(self, sizes, place)
        super().__init__(
            layer_specs(sizes, place),
            topology=pipe_topology(topology),
            loss_fn=self._loss,
            partition_method=partition,
            chunks=chunks,
            activation_checkpoint_interval=recompute.every,
            activation_checkpoint_func=recompute,
            **profile,
        )
        self._input_grad = [True, False] if has_segments else [True]
        self._input_type = ["float", "int"] if has_segments else ["float"]
        self._input_pipe_partitioned = [False] * len(self._input_grad)

    def _is_checkpointable(self, funcs: Sequence[Any]) -> bool:
        """Recompute each run of layers that holds a transformer layer; DeepSpeed's rule goes by other class names."""
        return any(isinstance(func, MptLayerPipe) for func in funcs)

    def _loss(self, logits: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor]) -> Weighted:
        return Weighted(*mpt_loss(logits, labels[0], labels[1], self.sizes, self.place))

    def logical_name(self, local_name: str) -> str:
        """Return the name that this parameter has in the single-stage model."""
        head, _, rest = local_name.partition(".")
        if head == "tied_modules":
            return rest  # "embedding.word.weight"
        index = int(head)
        if index == 0:
            return f"embedding.{rest}"
        if index <= self.sizes.num_layers:
            return f"layers.{index - 1}.{rest}"
        return f"{'final_norm' if index == self.sizes.num_layers + 1 else 'head'}.{rest}"
