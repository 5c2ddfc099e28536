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
from megatron.models.common.pipeline import ModelPipe, to_weighted
from megatron.models.t5.config import t5_units
from megatron.models.t5.layers import T5ModelArgs
from megatron.models.t5.model import (
    RelativeBias,
    T5DecoderLayer,
    T5EncoderLayer,
    embed,
    gather_memory,
    make_final_norm,
    tied_logits,
)
from megatron.mpu.layers import VocabParallelEmbedding
from tds.loss import Weighted
from tds.p2p.boundary import Boundary
from tds.pipe import LayerSpec, Shared, SharingLayerSpec

Tensors = tuple[torch.Tensor, ...]


class EmbeddingPipe(nn.Module):
    """One side's embedding, with tables shared with other layers.

    Encoder: (encoder tokens, decoder tokens[, both segments]) -> (hidden states, decoder tokens[, both segments]).
    Decoder: (memory, decoder tokens[, both segments]) -> (hidden states, memory[, both segments]).
    """

    word: VocabParallelEmbedding

    def __init__(self, args: T5ModelArgs, parallel: ParallelContext, side: str) -> None:
        super().__init__()
        self.model_args, self.parallel, self.side = args, parallel, side

    def forward(self, inputs: Tensors) -> Tensors:
        if self.side == "encoder":
            tokens, passed_through, *segments = inputs
        else:
            passed_through, tokens, *segments = inputs
        x = embed(
            tokens,
            self.word,
            getattr(self, "position", None),
            args=self.model_args,
            parallel=self.parallel,
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
    gradient for gathered memory is a partial sum on each rank; the gather's backward in the stage's first layer reduces
    it over the ranks.

    Attributes:
        is_first_in_chunk: first layer in its chunk; its input is a shard of memory.
        is_last_in_chunk: last layer in its chunk; its output is a shard of memory.
    """

    def __init__(self, args: T5ModelArgs, parallel: ParallelContext, layer: int) -> None:
        super().__init__(args, parallel, layer)
        self.is_last = layer == args.enc_layers + args.dec_layers - 1
        self.is_first_in_chunk = self.is_last_in_chunk = True
        self.output_shares: tuple[int, ...] = ()

    def partial_sum_indices(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return indices of inputs and outputs whose gradient is a partial sum: (1,) for memory, or ()."""
        memory_idx = (1,) if self.parallel.sequence_parallel else ()
        return () if self.is_first_in_chunk else memory_idx, () if self.is_last_in_chunk else memory_idx

    def forward(self, inputs: Tensors) -> torch.Tensor | Tensors:  # type: ignore[override]
        y, memory, *segments = inputs
        enc_segments, dec_segments = segments or (None, None)
        if self.is_first_in_chunk:
            memory = gather_memory(memory, self.parallel)
        y = super().forward(y, memory, getattr(self, "table", None), enc_segments, dec_segments)
        if self.is_last:
            return y
        return y, self.parallel.shard_sequence(memory) if self.is_last_in_chunk else memory, *segments


class PositionTable(PositionEmbedding):
    """The learned positions. Every rank holds the full table and looks up positions for its hidden states."""

    def __init__(self, parallel: ParallelContext, *table_shape: int) -> None:
        super().__init__(*table_shape)
        parallel.mark_sequence_parallel(self)


class NormPipe(nn.Module):
    """A side's final norm; additional tensors are passed through."""

    def __init__(self, args: T5ModelArgs, parallel: ParallelContext, side: str) -> None:
        super().__init__()
        self.norm = make_final_norm(args, parallel, side)

    def forward(self, inputs: torch.Tensor | Tensors) -> torch.Tensor | Tensors:
        if isinstance(inputs, torch.Tensor):
            normed: torch.Tensor = self.norm(inputs)
            return normed
        return self.norm(inputs[0]), *inputs[1:]


class TiedHeadPipe(nn.Module):
    """Head tied to the word table."""

    word: VocabParallelEmbedding

    def __init__(self, args: T5ModelArgs, parallel: ParallelContext) -> None:
        super().__init__()
        self.model_args, self.parallel = args, parallel

    def forward(self, x: torch.Tensor) -> Logits:
        return tied_logits(x, self.word.weight, self.model_args, self.parallel)


def layer_specs(args: T5ModelArgs, parallel: ParallelContext) -> list[LayerSpec]:
    """List specs for embedding, layers and norm in the encoder, the same in the decoder, and the head."""
    word = Shared(
        "word", VocabParallelEmbedding, args.vocab_size, args.hidden_size,
        divisible_by=args.make_vocab_size_divisible_by, **parallel.layer_kwargs,
    )  # fmt: skip
    tables = {"word": word}
    biases: dict[str, dict[str, Shared]] = {"encoder": {}, "decoder": {}}
    if args.is_relative:
        for side in biases:
            biases[side]["table"] = Shared(f"{side}_bias", RelativeBias, args, parallel, side == "encoder")
    else:
        table_shape = (args.max_position_embeddings, args.hidden_size)
        tables["position"] = Shared("position", PositionTable, parallel, *table_shape)
    encoder, decoder = range(args.enc_layers), range(args.enc_layers, args.enc_layers + args.dec_layers)
    head = SharingLayerSpec(TiedHeadPipe, args, parallel, shares={"word": word})
    return [
        SharingLayerSpec(EmbeddingPipe, args, parallel, "encoder", shares=tables),
        *[SharingLayerSpec(EncoderLayerPipe, args, parallel, i, shares=biases["encoder"]) for i in encoder],
        LayerSpec(NormPipe, args, parallel, "encoder"),
        SharingLayerSpec(EmbeddingPipe, args, parallel, "decoder", shares=tables),
        *[SharingLayerSpec(DecoderLayerPipe, args, parallel, i, shares=biases["decoder"]) for i in decoder],
        LayerSpec(NormPipe, args, parallel, "decoder"),
        LayerSpec(Head, args, parallel) if args.untie_embeddings else head,
    ]


def boundary_before(unit_idx: int, args: T5ModelArgs, has_segments: bool) -> list[Boundary]:
    """List the tensors sent to a stage that starts with ``unit_idx``, an index into ``layer_specs``."""
    units = t5_units(args.enc_layers, args.dec_layers)
    if unit_idx >= units.dec_norm:
        return [Boundary("hidden states")]
    second_boundary = Boundary("decoder tokens", "int") if unit_idx <= units.dec_embedding else Boundary("memory")
    segments = [Boundary(f"{side} segments", "int") for side in ("encoder", "decoder") if has_segments]
    return [Boundary("hidden states"), second_boundary, *segments]


def random_batch(vocab_size: int, shape: tuple[int, ...], has_segments: bool) -> tuple[Any, Any]:
    """Make (inputs, labels) for a micro-batch with random tokens, the same on every rank.

    Args:
        shape: (b, s_e, s_d).
    """
    b, s_e, s_d = shape
    generator = torch.Generator().manual_seed(0)
    enc_tokens, dec_tokens = (torch.randint(vocab_size, (b, s), generator=generator) for s in (s_e, s_d))
    segments = tuple(torch.zeros((b, s), dtype=torch.int32) for s in (s_e, s_d) if has_segments)
    return (enc_tokens, dec_tokens, *segments), (dec_tokens.roll(-1, dims=1), torch.ones(b, s_d))


class T5ModelPipe(ModelPipe):
    """T5 split over the pipeline stages in ``topology``; stages may start at any layer.

    The pipeline's layers are embedding, layers and norm in the encoder, the same in the decoder, and the head.
    """

    layer_classes = (EncoderLayerPipe, DecoderLayerPipe)

    @classmethod
    def boundary_kwargs(cls, config: Config) -> dict[str, bool]:
        return {"has_segments": config.family_config.has_segments(config.data.reset_attention_mask)}

    def _declare_boundaries(self) -> None:
        self._mark_chunk_ends()
        bounds = enumerate(self.parts[1:-1])
        self.boundary = {
            chunk_idx: boundary_before(bound, self.model_args, self.has_segments) for chunk_idx, bound in bounds
        }

    def specs(self) -> list[LayerSpec]:
        return layer_specs(self.model_args, self.parallel)

    def random_batch(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        return random_batch(self.model_args.vocab_size, shape, self.has_segments)

    def _mark_chunk_ends(self) -> None:
        """Mark the decoder layers where memory enters and leaves a chunk on this stage."""
        units = t5_units(self.model_args.enc_layers, self.model_args.dec_layers).dec_layers
        for layer in self.modules():
            if isinstance(layer, DecoderLayerPipe):
                unit_idx = units[layer.layer - self.model_args.enc_layers]
                layer.is_first_in_chunk = unit_idx in (units.start, *self.parts)
                layer.is_last_in_chunk = unit_idx + 1 in self.parts
                layer.shares, layer.output_shares = layer.partial_sum_indices()

    def _loss(self, logits: Logits, labels: tuple[torch.Tensor, torch.Tensor]) -> Any:
        loss = model_loss(logits, labels[0], labels[1], self.model_args, self.parallel)
        return to_weighted(loss) if isinstance(loss, dict) else Weighted(*loss)

    def made_output(self, output: Logits) -> torch.Tensor:
        """Convert the logits to a tensor, for evaluations that return outputs."""
        return materialize_logits(output)

    def logical_name(self, local_name: str) -> str:
        """Return this parameter's or module's name (with a trailing dot for modules) in the single-stage model."""
        prefix, _, suffix = local_name.partition(".")
        if prefix == "tied_modules":
            key, _, suffix = suffix.partition(".")
            side, _, is_bias = key.partition("_")
            return f"{side}.bias.{suffix}" if is_bias else f"embedding.{local_name.removeprefix('tied_modules.')}"
        unit_idx, units = int(prefix), t5_units(self.model_args.enc_layers, self.model_args.dec_layers)
        if unit_idx in (units.enc_embedding, units.dec_embedding):
            return f"embedding.{suffix}"
        for side, layers in (("encoder", units.enc_layers), ("decoder", units.dec_layers)):
            if unit_idx in layers:
                return f"{side}.layers.{layers.index(unit_idx)}.{suffix}"
            if unit_idx == layers.stop:
                return f"{side}.final_norm.{suffix.removeprefix('norm.')}"
        return f"head.{suffix}"
