"""T5 as a list of layers for the pipeline engine.

The tensors that a stage sends depend on its last layer:

| last layer of the stage | tensors |
|---|---|
| of the encoder | hidden states [s_e, b, h], decoder tokens [b, s_d], segments of both sides |
| of the decoder | hidden states [s_d, b, h], the encoder's output ("memory") [s_e, b, h], segments of both sides |
| the decoder's last layer or its norm | hidden states [s_d, b, h] |

Segments are sent only if documents are kept apart or inputs are padded. Masks are never sent.

Each decoder layer passes memory on unchanged, so that in backward its gradient is accumulated layer by layer. The word
table is shared by both embeddings and a tied head, learned positions by both embeddings, and each relative bias table
by all layers of its side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron.config import Config
from megatron.models.common.language_model import Head, Logits, PositionEmbedding, materialize_logits, model_loss
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.pipeline import ModelPipe, weighted
from megatron.models.t5.config import t5_units
from megatron.models.t5.layers import T5ModelArgs
from megatron.models.t5.model import (
    RelativeBias,
    T5DecoderLayer,
    T5EncoderLayer,
    embed,
    entered,
    make_final_norm,
    tied_logits,
)
from megatron.mpu.layers import VocabParallelEmbedding
from tds.loss import Weighted
from tds.p2p.boundary import Boundary
from tds.pipe import LayerSpec, Shared, SharingLayerSpec

Tensors = tuple[torch.Tensor, ...]


class EmbeddingPipe(nn.Module):
    """The embedding of one side, with tables shared with other layers.

    Encoder: (encoder tokens, decoder tokens[, both segments]) -> (hidden states, decoder tokens[, both segments]).
    Decoder: (memory, decoder tokens[, both segments]) -> (hidden states, memory[, both segments]).
    """

    word: VocabParallelEmbedding

    def __init__(self, sizes: T5ModelArgs, place: ParallelContext, side: str) -> None:
        super().__init__()
        self.sizes, self.place, self.side = sizes, place, side

    def forward(self, inputs: Tensors) -> Tensors:
        if self.side == "encoder":
            tokens, passed_through, *segments = inputs
        else:
            passed_through, tokens, *segments = inputs
        x = embed(
            tokens,
            self.word,
            getattr(self, "position", None),
            sizes=self.sizes,
            place=self.place,
            side=self.side,
            training=self.training,
            segments=segments[self.side == "decoder"] if segments else None,
        )  # [s, b, h]
        return x, passed_through, *segments


class EncoderLayerPipe(T5EncoderLayer):
    """Encoder layer that passes the decoder's inputs through."""

    def forward(self, inputs: Tensors) -> Tensors:  # type: ignore[override]
        x, dec_tokens, *segments = inputs
        x = super().forward(x, getattr(self, "table", None), *segments[:1])
        return x, dec_tokens, *segments


class DecoderLayerPipe(T5DecoderLayer):
    """Decoder layer that passes memory and segments through, except for the last layer.

    With sequence parallelism, stages send shards of memory, and layers within a stage pass the gathered memory. The
    gradient of gathered memory is a partial sum on each rank; the backward of the gather in the stage's first layer
    reduces it over the ranks.

    Attributes:
        is_first_here: first layer of its chunk; its input is a shard of memory.
        is_last_here: last layer of its chunk; its output is a shard of memory.
    """

    def __init__(self, sizes: T5ModelArgs, place: ParallelContext, layer: int) -> None:
        super().__init__(sizes, place, layer)
        self.is_last = layer == sizes.enc_layers + sizes.dec_layers - 1
        self.is_first_here = self.is_last_here = True
        self.output_shares: tuple[int, ...] = ()

    def sums_of_memory(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the indices of inputs and of outputs whose gradient is a partial sum: (1,) for memory, or ()."""
        memory_idx = (1,) if self.place.sequence_parallel else ()
        return () if self.is_first_here else memory_idx, () if self.is_last_here else memory_idx

    def forward(self, inputs: Tensors) -> torch.Tensor | Tensors:  # type: ignore[override]
        y, memory, *segments = inputs
        enc_segments, dec_segments = segments or (None, None)
        if self.is_first_here:
            memory = entered(memory, self.place)
        y = super().forward(y, memory, getattr(self, "table", None), enc_segments, dec_segments)
        if self.is_last:
            return y
        return y, self.place.part(memory) if self.is_last_here else memory, *segments


class PositionTable(PositionEmbedding):
    """The learned positions. Every rank holds the full table and looks up the positions of its hidden states."""

    def __init__(self, place: ParallelContext, *size: int) -> None:
        super().__init__(*size)
        place.on_part(self)


class NormPipe(nn.Module):
    """The final norm of a side; further tensors are passed through."""

    def __init__(self, sizes: T5ModelArgs, place: ParallelContext, side: str) -> None:
        super().__init__()
        self.norm = make_final_norm(sizes, place, side)

    def forward(self, inputs: torch.Tensor | Tensors) -> torch.Tensor | Tensors:
        if isinstance(inputs, torch.Tensor):
            normed: torch.Tensor = self.norm(inputs)
            return normed
        return self.norm(inputs[0]), *inputs[1:]


class TiedHeadPipe(nn.Module):
    """Head tied to the word table."""

    word: VocabParallelEmbedding

    def __init__(self, sizes: T5ModelArgs, place: ParallelContext) -> None:
        super().__init__()
        self.sizes, self.place = sizes, place

    def forward(self, x: torch.Tensor) -> Logits:
        return tied_logits(x, self.word.weight, self.sizes, self.place)


def layer_specs(sizes: T5ModelArgs, place: ParallelContext) -> list[LayerSpec]:
    """Return the specs of embedding, layers and norm of the encoder, the same of the decoder, and the head."""
    word = Shared(
        "word", VocabParallelEmbedding, sizes.vocab_size, sizes.hidden_size,
        divisible_by=sizes.make_vocab_size_divisible_by, **place.cut,
    )  # fmt: skip
    tables = {"word": word}
    biases: dict[str, dict[str, Shared]] = {"encoder": {}, "decoder": {}}
    if sizes.is_relative:
        for side in biases:
            biases[side]["table"] = Shared(f"{side}_bias", RelativeBias, sizes, place, side == "encoder")
    else:
        size = (sizes.max_position_embeddings, sizes.hidden_size)
        tables["position"] = Shared("position", PositionTable, place, *size)
    encoder, decoder = range(sizes.enc_layers), range(sizes.enc_layers, sizes.enc_layers + sizes.dec_layers)
    head = SharingLayerSpec(TiedHeadPipe, sizes, place, shares={"word": word})
    return [
        SharingLayerSpec(EmbeddingPipe, sizes, place, "encoder", shares=tables),
        *[SharingLayerSpec(EncoderLayerPipe, sizes, place, i, shares=biases["encoder"]) for i in encoder],
        LayerSpec(NormPipe, sizes, place, "encoder"),
        SharingLayerSpec(EmbeddingPipe, sizes, place, "decoder", shares=tables),
        *[SharingLayerSpec(DecoderLayerPipe, sizes, place, i, shares=biases["decoder"]) for i in decoder],
        LayerSpec(NormPipe, sizes, place, "decoder"),
        LayerSpec(Head, sizes, place) if sizes.untie_embeddings else head,
    ]


def boundary_before(layer: int, sizes: T5ModelArgs, has_segments: bool) -> list[Boundary]:
    """Return the tensors sent to a stage that starts with ``layer``, an index into ``layer_specs``."""
    units = t5_units(sizes.enc_layers, sizes.dec_layers)
    if layer >= units.dec_norm:
        return [Boundary("hidden states")]
    second = Boundary("decoder tokens", "int") if layer <= units.dec_embedding else Boundary("memory")
    segments = [Boundary(f"{side} segments", "int") for side in ("encoder", "decoder") if has_segments]
    return [Boundary("hidden states"), second, *segments]


def random_batch(vocab_size: int, shape: tuple[int, ...], has_segments: bool) -> tuple[Any, Any]:
    """Return (inputs, labels) of a micro-batch of random tokens, the same on every rank.

    Args:
        shape: (b, s_e, s_d).
    """
    b, s_e, s_d = shape
    generator = torch.Generator().manual_seed(0)
    enc_tokens, dec_tokens = (torch.randint(vocab_size, (b, s), generator=generator) for s in (s_e, s_d))
    segments = tuple(torch.zeros((b, s), dtype=torch.int32) for s in (s_e, s_d) if has_segments)
    return (enc_tokens, dec_tokens, *segments), (dec_tokens.roll(-1, dims=1), torch.ones(b, s_d))


class T5ModelPipe(ModelPipe):
    """T5 split over the pipeline stages of ``topology``; stages may start at any layer.

    Its layers are embedding, layers and norm of the encoder, the same of the decoder, and the head.
    """

    layer_classes = (EncoderLayerPipe, DecoderLayerPipe)

    @classmethod
    def beside(cls, config: Config) -> dict[str, bool]:
        return {"has_segments": config.own.has_segments(config.data.reset_attention_mask)}

    def _declare_boundaries(self) -> None:
        self._mark_ends_of_pieces()
        bounds = enumerate(self.parts[1:-1])
        self.boundary = {piece: boundary_before(end, self.sizes, self.has_segments) for piece, end in bounds}

    def specs(self) -> list[LayerSpec]:
        return layer_specs(self.sizes, self.place)

    def random_batch(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        return random_batch(self.sizes.vocab_size, shape, self.has_segments)

    def _mark_ends_of_pieces(self) -> None:
        """Mark the decoder layers at which memory enters and leaves a chunk of this stage."""
        units = t5_units(self.sizes.enc_layers, self.sizes.dec_layers).dec_layers
        for layer in self.modules():
            if isinstance(layer, DecoderLayerPipe):
                unit = units[layer.layer - self.sizes.enc_layers]
                layer.is_first_here = unit in (units.start, *self.parts)
                layer.is_last_here = unit + 1 in self.parts
                layer.shares, layer.output_shares = layer.sums_of_memory()

    def _loss(self, logits: Logits, labels: tuple[torch.Tensor, torch.Tensor]) -> Any:
        loss = model_loss(logits, labels[0], labels[1], self.sizes, self.place)
        return weighted(loss) if isinstance(loss, dict) else Weighted(*loss)

    def made_output(self, output: Logits) -> torch.Tensor:
        """Return the logits as a tensor, for evaluations that return outputs."""
        return materialize_logits(output)

    def logical_name(self, local_name: str) -> str:
        """Return the name of this parameter, or of this module (with a trailing dot), in the single-stage model."""
        head, _, rest = local_name.partition(".")
        if head == "tied_modules":
            key, _, rest = rest.partition(".")
            side, _, is_bias = key.partition("_")
            return f"{side}.bias.{rest}" if is_bias else f"embedding.{local_name.removeprefix('tied_modules.')}"
        unit_idx, units = int(head), t5_units(self.sizes.enc_layers, self.sizes.dec_layers)
        if unit_idx in (units.enc_embedding, units.dec_embedding):
            return f"embedding.{rest}"
        for side, layers in (("encoder", units.enc_layers), ("decoder", units.dec_layers)):
            if unit_idx in layers:
                return f"{side}.layers.{layers.index(unit_idx)}.{rest}"
            if unit_idx == layers.stop:
                return f"{side}.final_norm.{rest.removeprefix('norm.')}"
        return f"head.{rest}"
