"""GPT-2 as a list of layers for the pipeline engine.

Between stages travel the hidden states [s, b, h] and, with documents kept apart, segment ids [b, s]; never a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.model.embedding import Embedding
from megatron.model.gpt2 import gpt2_loss
from megatron.model.head import Head, logits_of
from megatron.model.layer import TransformerLayer
from megatron.model.norm import LayerNorm
from megatron.model.sizes import Place, Sizes
from megatron.mpu.layers import VocabParallelEmbedding
from megatron.mpu.topology import Topology
from megatron.ops.attention import document_mask
from megatron.pipe.recompute import stage_recompute
from megatron.pipe.topology import pipe_topology
from tds.loss import Weighted
from tds.pipe import LayerSpec, PipelineModule, TiedLayerSpec

Stream = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # hidden states, or hidden states and segment ids


class EmbeddingPipe(Embedding):
    """(tokens, position_ids[, segment_ids]) to hidden states[, segment_ids]."""

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> Stream:  # type: ignore[override]
        x = super().forward(inputs[0], inputs[1])
        return x if len(inputs) == 2 else (x, inputs[2])


class TransformerLayerPipe(TransformerLayer):
    """A layer that passes segment ids on and builds its mask from them here, on its own stage."""

    def forward(self, inputs: Stream) -> Stream:  # type: ignore[override]
        if isinstance(inputs, torch.Tensor):
            return super().forward(inputs)
        x, segment_ids = inputs
        return super().forward(x, document_mask(segment_ids)), segment_ids


class FinalNormPipe(LayerNorm):
    """The last norm; segment ids end here."""

    def forward(self, inputs: Stream) -> torch.Tensor:
        return super().forward(inputs if isinstance(inputs, torch.Tensor) else inputs[0])


class TiedTable(nn.Module):
    """The word table as the last stage holds it, for the head; positions stay on the first stage."""

    def __init__(self, sizes: Sizes, place: Place) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(
            sizes.vocab_size, sizes.hidden_size, divisible_by=sizes.make_vocab_size_divisible_by, group=place.group
        )


def _tied_head(place: Place, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return logits_of(x, module.word.weight, place.group)  # type: ignore[union-attr, arg-type]


def layer_specs(sizes: Sizes, place: Place) -> list[LayerSpec]:
    """Return embedding, ``num_layers`` transformer layers, final norm and head."""
    layers = [LayerSpec(TransformerLayerPipe, sizes, place, i) for i in range(sizes.num_layers)]
    norm = LayerSpec(FinalNormPipe, sizes.hidden_size, sizes.layernorm_epsilon)
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
    positions = torch.arange(shape[1]).expand(shape).contiguous()
    segments = (torch.zeros(shape, dtype=torch.int32),) if has_segments else ()
    return (tokens, positions, *segments), (tokens.roll(-1, dims=1), torch.ones(shape))


class GPT2ModelPipe(PipelineModule):
    """GPT-2 over the pipeline stages of ``topology``.

    Args:
        partition: bounds of the pieces in layers (embedding, transformer layers, norm, head), or the name of a
            partition method; "profile" times the layers on ``probe``.
        chunks: pieces on each stage; piece ``chunk * p + stage`` lies on ``stage``.
        has_segments: segment ids travel with the hidden states.
        probe: (micro-batch size, sequence length).
    """

    loss_weighting = "tokens"  # for the start table

    def __init__(
        self,
        sizes: Sizes,
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
        return any(isinstance(func, TransformerLayerPipe) for func in funcs)

    def _loss(self, logits: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor]) -> Weighted:
        return Weighted(*gpt2_loss(logits, labels[0], labels[1], self.sizes, self.place))

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
