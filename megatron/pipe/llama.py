"""LLaMA as a list of layers for the pipeline engine.

Between stages travel the hidden states [s, b, h]; with documents kept apart segment ids [b, s], with positions that
begin anew in each document these [b, s], too; never a mask, nor an angle.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.model.embedding import WordEmbedding
from megatron.model.head import Head, logits_of
from megatron.model.llama import LlamaLayer, llama_loss
from megatron.model.norm import RMSNorm
from megatron.model.sizes import LlamaSizes, Place
from megatron.mpu.topology import Topology
from megatron.ops.attention import document_mask
from megatron.pipe.gpt2 import TiedTable
from megatron.pipe.recompute import stage_recompute
from megatron.pipe.topology import pipe_topology
from tds.loss import Weighted
from tds.pipe import LayerSpec, PipelineModule, TiedLayerSpec

Stream = torch.Tensor | tuple[torch.Tensor, ...]  # hidden states, or these with what travels beside them


class EmbeddingPipe(WordEmbedding):
    """Tokens, or (tokens[, segment_ids][, position_ids]), to hidden states with the same beside them."""

    def forward(self, inputs: Stream) -> Stream:  # type: ignore[override]
        if isinstance(inputs, torch.Tensor):
            return super().forward(inputs)
        x = super().forward(inputs[0])
        return x if len(inputs) == 1 else (x, *inputs[1:])


class LlamaLayerPipe(LlamaLayer):
    """A layer that passes segment ids and positions on and builds its mask here, on its own stage.

    Args:
        has_segments: segment ids are the first beside the hidden states; positions follow, if there are any.
    """

    def __init__(self, sizes: LlamaSizes, place: Place, layer: int, has_segments: bool = False) -> None:
        super().__init__(sizes, place, layer)
        self.has_segments = has_segments

    def forward(self, inputs: Stream) -> Stream:  # type: ignore[override]
        if isinstance(inputs, torch.Tensor):
            return super().forward(inputs)
        x, *beside = inputs
        mask = document_mask(beside[0]) if self.has_segments else None
        positions = beside[-1] if len(beside) > self.has_segments else None
        return super().forward(x, mask, None, positions), *beside


class FinalNormPipe(RMSNorm):
    """The last norm; what travels beside the hidden states ends here."""

    def forward(self, inputs: Stream) -> torch.Tensor:
        return super().forward(inputs if isinstance(inputs, torch.Tensor) else inputs[0])


def _tied_head(place: Place, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return logits_of(x, module.word.weight, place.group)  # type: ignore[union-attr, arg-type]


def layer_specs(sizes: LlamaSizes, place: Place, has_segments: bool = False) -> list[LayerSpec]:
    """Return embedding, ``num_layers`` transformer layers, final norm and head."""
    layers = [LayerSpec(LlamaLayerPipe, sizes, place, i, has_segments) for i in range(sizes.num_layers)]
    norm = LayerSpec(FinalNormPipe, sizes.hidden_size, sizes.layernorm_epsilon)
    if sizes.untie_embeddings:
        return [LayerSpec(EmbeddingPipe, sizes, place), *layers, norm, LayerSpec(Head, sizes, place)]
    first = TiedLayerSpec("embedding", EmbeddingPipe, sizes, place, tied_weight_attr="word.weight")
    head = partial(_tied_head, place)
    last = TiedLayerSpec("embedding", TiedTable, sizes, place, forward_fn=head, tied_weight_attr="word.weight")
    return [first, *layers, norm, last]


def random_batch(vocab_size: int, shape: tuple[int, int], has_segments: bool, has_positions: bool) -> tuple[Any, Any]:
    """Return (inputs, labels) of a micro-batch of random tokens, the same on every rank.

    Shapes:
        each tensor [b, s], by ``shape``
    """
    tokens = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0))
    segments = (torch.zeros(shape, dtype=torch.int32),) if has_segments else ()
    positions = (torch.arange(shape[1]).expand(shape).contiguous(),) if has_positions else ()
    return (tokens, *segments, *positions), (tokens.roll(-1, dims=1), torch.ones(shape))


class LlamaModelPipe(PipelineModule):
    """LLaMA over the pipeline stages of ``topology``; the other ``Args`` as of ``GPT2ModelPipe``.

    Args:
        has_segments, has_positions: segment ids, and positions, travel with the hidden states.
    """

    loss_weighting = "tokens"  # for the start table

    def __init__(
        self,
        sizes: LlamaSizes,
        place: Place,
        topology: Topology,
        *,
        partition: str | list[int] = "parameters",
        chunks: int = 1,
        has_segments: bool = False,
        has_positions: bool = False,
        probe: tuple[int, int] | None = None,
    ) -> None:
        self.sizes, self.place, self.has_segments = sizes, place, has_segments
        beside = (has_segments, has_positions)
        profile = {} if probe is None else {"profile_batch": random_batch(sizes.vocab_size, probe, *beside)}
        recompute = stage_recompute(self, sizes, place)
        super().__init__(
            layer_specs(sizes, place, has_segments),
            topology=pipe_topology(topology),
            loss_fn=self._loss,
            partition_method=partition,
            chunks=chunks,
            activation_checkpoint_interval=recompute.every,
            activation_checkpoint_func=recompute,
            **profile,
        )
        self._input_grad = [True, *[False] * sum(beside)]
        self._input_type = ["float", *["int"] * sum(beside)]
        self._input_pipe_partitioned = [False] * len(self._input_grad)

    def _is_checkpointable(self, funcs: Sequence[Any]) -> bool:
        """Recompute each run of layers that holds a transformer layer; DeepSpeed's rule goes by other class names."""
        return any(isinstance(func, LlamaLayerPipe) for func in funcs)

    def _loss(self, logits: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor]) -> Weighted:
        return Weighted(*llama_loss(logits, labels[0], labels[1], self.sizes, self.place))

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
