"""T5 as a list of layers for the pipeline engine.

What a stage passes on depends on the side whose layers it ends with; never a mask:

| its last layer | tensors |
|---|---|
| of the encoder | hidden states [s_e, b, h], decoder tokens [b, s_d], segments of both sides |
| of the decoder | hidden states [s_d, b, h], the encoder's output ("memory") [s_e, b, h], segments of both sides |
| the last of the decoder, or its norm | hidden states [s_d, b, h] |

Segments travel where documents are kept apart.

Each decoder layer hands memory on as it came, so that on the way back its gradient is summed layer by layer. The word
table is shared by both embeddings and a tied head, learned positions by both embeddings, and each table of relative
biases by all layers of its side.
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
    """The embedding of one side, by tables that are shared with others.

    Encoder: (its tokens, decoder tokens[, segments of both]) to (hidden states, decoder tokens[, segments]).
    Decoder: (memory, its tokens[, segments of both]) to (hidden states, memory[, segments]).
    """

    word: VocabParallelEmbedding

    def __init__(self, sizes: T5ModelArgs, place: ParallelContext, side: str) -> None:
        super().__init__()
        self.sizes, self.place, self.side = sizes, place, side

    def forward(self, inputs: Tensors) -> Tensors:
        if self.side == "encoder":
            tokens, beside, *segments = inputs
        else:
            beside, tokens, *segments = inputs
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
        return x, beside, *segments


class EncoderLayerPipe(T5EncoderLayer):
    """A layer of the encoder, past which travels what the decoder will need."""

    def forward(self, inputs: Tensors) -> Tensors:  # type: ignore[override]
        x, dec_tokens, *segments = inputs
        x = super().forward(x, getattr(self, "table", None), *segments[:1])
        return x, dec_tokens, *segments


class DecoderLayerPipe(T5DecoderLayer):
    """A layer of the decoder, which hands memory and segments on unless it is the last one.

    Where the sequence is cut, the part of memory travels between stages and all of it between the layers of one: its
    gradient there is each rank's share, which the one who joins the parts sums over the ranks.

    Attributes:
        is_first_here: of its piece, which the part of memory enters.
        is_last_here: of its piece, which the part of memory leaves.
    """

    def __init__(self, sizes: T5ModelArgs, place: ParallelContext, layer: int) -> None:
        super().__init__(sizes, place, layer)
        self.is_last = layer == sizes.enc_layers + sizes.dec_layers - 1
        self.is_first_here = self.is_last_here = True
        self.output_shares: tuple[int, ...] = ()

    def sums_of_memory(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (1,) for what it takes and for what it gives, where the gradient of memory is a share; or ()."""
        whole = (1,) if self.place.sequence_parallel else ()
        return () if self.is_first_here else whole, () if self.is_last_here else whole

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
    """The learned positions, which every rank holds whole and looks up for its hidden states alone."""

    def __init__(self, place: ParallelContext, *size: int) -> None:
        super().__init__(*size)
        place.on_part(self)


class NormPipe(nn.Module):
    """The norm at the end of a side; what comes beside the hidden states passes by."""

    def __init__(self, sizes: T5ModelArgs, place: ParallelContext, side: str) -> None:
        super().__init__()
        self.norm = make_final_norm(sizes, place, side)

    def forward(self, inputs: torch.Tensor | Tensors) -> torch.Tensor | Tensors:
        if isinstance(inputs, torch.Tensor):
            normed: torch.Tensor = self.norm(inputs)
            return normed
        return self.norm(inputs[0]), *inputs[1:]


class TiedHeadPipe(nn.Module):
    """Logits by the word table."""

    word: VocabParallelEmbedding

    def __init__(self, sizes: T5ModelArgs, place: ParallelContext) -> None:
        super().__init__()
        self.sizes, self.place = sizes, place

    def forward(self, x: torch.Tensor) -> Logits:
        return tied_logits(x, self.word.weight, self.sizes, self.place)


def layer_specs(sizes: T5ModelArgs, place: ParallelContext) -> list[LayerSpec]:
    """Return the encoder's embedding, layers and norm, the decoder's, and the head."""
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
    """Return what crosses into a stage that begins with ``layer`` of the list."""
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
    """T5 over the pipeline stages of ``topology``, which may be cut anywhere.

    Its layers are embedding, layers and norm of the encoder, then of the decoder, and the head.
    """

    layer_classes = (EncoderLayerPipe, DecoderLayerPipe)

    @classmethod
    def beside(cls, config: Config) -> dict[str, bool]:
        return {"has_segments": config.own.has_segments(config.data.reset_attention_mask)}

    def _declare_boundaries(self) -> None:
        self._mark_ends_of_pieces()
        ends = enumerate(self.parts[1:-1])
        self.boundary = {piece: boundary_before(end, self.sizes, self.has_segments) for piece, end in ends}

    def specs(self) -> list[LayerSpec]:
        return layer_specs(self.sizes, self.place)

    def random_batch(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        return random_batch(self.sizes.vocab_size, shape, self.has_segments)

    def _mark_ends_of_pieces(self) -> None:
        """Tell the layers of the decoder which of them memory enters and leaves this stage by."""
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
        """Return the logits to who asks an evaluation for outputs."""
        return materialize_logits(output)

    def logical_name(self, local_name: str) -> str:
        """Return the name of this parameter, or module with a dot behind it, in the single-stage model."""
        head, _, rest = local_name.partition(".")
        if head == "tied_modules":
            key, _, rest = rest.partition(".")
            side, _, is_bias = key.partition("_")
            return f"{side}.bias.{rest}" if is_bias else f"embedding.{local_name.removeprefix('tied_modules.')}"
        index, units = int(head), t5_units(self.sizes.enc_layers, self.sizes.dec_layers)
        if index in (units.enc_embedding, units.dec_embedding):
            return f"embedding.{rest}"
        for side, layers in (("encoder", units.enc_layers), ("decoder", units.dec_layers)):
            if index in layers:
                return f"{side}.layers.{layers.index(index)}.{rest}"
            if index == layers.stop:
                return f"{side}.final_norm.{rest.removeprefix('norm.')}"
        return f"head.{rest}"
