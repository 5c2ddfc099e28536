"""T5Model: embeddings, encoder, decoder and head, and the initial weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.config import Config
from megatron.models.common.language_model import (
    Head,
    Logits,
    PositionEmbedding,
    head_output,
    materialize_logits,
    model_loss,
    shared_table,
)
from megatron.models.common.model_args import fields_held
from megatron.models.common.norms import RMSNorm
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.parameters import RESIDUAL_OUTPUTS, Rule, gpt2_rule
from megatron.models.common.transformer import Recompute, recompute_switches, run_layers
from megatron.models.parts import ModelParts
from megatron.models.t5.config import t5_units
from megatron.models.t5.layers import RelativeBias, T5DecoderLayer, T5EncoderLayer, T5ModelArgs, make_norm
from megatron.mpu.embedding_lookup import HALF_PRECISION
from megatron.mpu.layers import VocabParallelEmbedding
from megatron.mpu.mappings import gather_from_sequence_region
from megatron.ops.attention import positions_in_segments

# Embedding, final norms and head.


class T5Embedding(nn.Module):
    """Word embedding, learned positions in the variant that has them, and dropout. Both sides share the tables.

    Shapes:
        tokens, segments [b, s]
        output [s, b, h], or this rank's shard of the sequence, depending on ``place``

    ``side``, "encoder" or "decoder", selects the dropout masks.
    """

    def __init__(self, sizes: T5ModelArgs, place: ParallelContext) -> None:
        super().__init__()
        self.sizes, self.place = sizes, place
        self.word = VocabParallelEmbedding(
            sizes.vocab_size, sizes.hidden_size, divisible_by=sizes.make_vocab_size_divisible_by, **place.cut
        )
        size = (sizes.max_position_embeddings, sizes.hidden_size)
        self.position = None if sizes.is_relative else place.on_part(PositionEmbedding(*size))

    def forward(
        self,
        tokens: torch.Tensor,
        segments: torch.Tensor | None = None,
        *,
        side: str,
        table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return embed(
            tokens,
            self.word,
            self.position,
            sizes=self.sizes,
            place=self.place,
            side=side,
            training=self.training,
            segments=segments,
            table=table,
        )


def embed(
    tokens: torch.Tensor,
    word: VocabParallelEmbedding,
    position: PositionEmbedding | None,
    *,
    sizes: T5ModelArgs,
    place: ParallelContext,
    side: str,
    training: bool,
    segments: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the input hidden states of ``side``; learned positions restart in each segment.

    Shapes:
        tokens, segments [b, s]
        output [s, b, h], or this rank's shard of the sequence, depending on ``place``

    Args:
        table: the full word table, from ``shared_table``, in which rows are looked up instead of calling ``word``.
    """
    x = word(tokens.t()) if table is None else F.embedding(tokens.t(), table, sparse=True)  # [s, b, h]
    if position is not None:
        if segments is None:
            x = x + position(place.part(torch.arange(tokens.shape[1], device=tokens.device))).unsqueeze(1)
        else:
            x = x + position(place.part(positions_in_segments(segments).t()))
    return place.dropout(x, sizes.hidden_dropout, training=training, layer=-1, site=f"{side} embedding")


def make_final_norm(sizes: T5ModelArgs, place: ParallelContext, side: str) -> nn.Module:
    """Build the final norm of ``side``; with relative positions it is followed by dropout."""
    return FinalRMSNorm(sizes, place, side) if sizes.is_relative else make_norm(sizes, place)


class FinalRMSNorm(RMSNorm):
    """The final norm of a side, followed by dropout.

    Shapes:
        input, output [s, b, h]
    """

    def __init__(self, sizes: T5ModelArgs, place: ParallelContext, side: str) -> None:
        super().__init__(sizes.hidden_size, sizes.layernorm_epsilon)
        self.dropout, self.place, self.side = sizes.hidden_dropout, place, side
        place.on_part(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.place.dropout(
            super().forward(x), self.dropout, training=self.training, layer=-1, site=f"{self.side} final norm"
        )


def tied_logits(x: torch.Tensor, weight: torch.Tensor, sizes: T5ModelArgs, place: ParallelContext) -> Logits:
    """Return the logits of a head tied to the word table; with relative positions ``x`` is scaled by ``h ** -0.5``.

    Shapes:
        x      [s, b, h], or this rank's shard of the sequence, depending on ``place``
        weight [v/t, h]
        output [s, b, v/t], or ``LazyLogits``

    Source: Raffel et al.'s code, for weights of variance 1; the papers do not mention it.
    """
    if sizes.is_relative:
        x = x * sizes.hidden_size**-0.5
    return head_output(x, weight, sizes, place)


def t5_model_args_from(model: Any, t5: Any, **overrides: Any) -> T5ModelArgs:
    """Build ``T5ModelArgs`` from the configuration sections ``model`` and ``t5``."""
    return T5ModelArgs(**{**fields_held(T5ModelArgs, model), **fields_held(T5ModelArgs, t5), **overrides})


def t5_rule(sizes: T5ModelArgs, std: float, *, is_given: bool = False) -> Rule:
    """Return the rule for T5's initial weights.

    The variant with learned positions, and any variant if ``std`` was set explicitly (``is_given``), use GPT-2's rule.
    Otherwise, with relative positions, the standard deviation is 1 for tables, ``n ** -0.5`` for a linear layer with n
    inputs, and ``(h d) ** -0.5`` for queries, because scores are not scaled. These are the factors of Hugging Face's
    ``_init_weights``.

    Source: Raffel et al. 2020, code; Shazeer and Stern 2018, "Adafactor".
    """
    if is_given or not sizes.is_relative:
        sides = {"encoder": gpt2_rule(std, sizes.enc_layers), "decoder": gpt2_rule(std, sizes.dec_layers)}
        return lambda name, shape: sides.get(name.partition(".")[0], sides["encoder"])(name, shape)
    default_std = sizes.hidden_size**-0.5
    query_std = (sizes.hidden_size * sizes.kv_hidden_size) ** -0.5

    def rule(name: str, shape: tuple[int, ...]) -> float | torch.Tensor:
        if name in ("embedding.word.weight", "head.weight"):
            return 1.0
        if name.endswith(".query_key_value.weight"):  # rows of a head: query, key, value
            head = torch.tensor([query_std, default_std, default_std]).repeat_interleave(sizes.kv_hidden_size)
            return head.repeat(sizes.num_attention_heads).unsqueeze(1)
        if name.endswith(".query.weight"):
            return query_std
        return shape[1] ** -0.5 if name.endswith(RESIDUAL_OUTPUTS) else default_std

    return rule


# T5 without pipeline stages.

__all__ = [
    "MODEL",
    "RelativeBias",
    "T5DecoderLayer",
    "T5Embedding",
    "T5EncoderLayer",
    "T5Model",
    "embed",
    "entered",
    "example_inputs",
    "make_final_norm",
    "make_norm",
    "model_args",
    "tied_logits",
    "weight_init",
]


class T5Model(nn.Module):
    """Encoder-decoder language model, sharded over the tensor-parallel group of ``place``.

    | | T5, T5 v1.1, mT5 (relative) | CPM's variant (learned) |
    |---|---|---|
    | positions | bias in self-attention by distance | table added to the word embeddings of both sides |
    | norm | RMSNorm | LayerNorm with bias |
    | scores | not scaled | scaled by ``d ** -0.5`` |
    | input of a tied head | ``x h ** -0.5`` | ``x`` |
    | dropout | as in CPM's variant, and after activations and final norms | residual branches, embeddings, attention |

    Shapes:
        enc_tokens [b, s_e], dec_tokens [b, s_d]
        enc_segments, dec_segments with the same shapes, both or none: the document of each position, -1 for padding.
            If given, attention stays within documents, and learned positions restart in each document
        output logits [s_d, b, v/t]; with ``labels`` and ``loss_mask`` [b, s_d] the pair (loss sum, token count)

    Source: Raffel et al. 2020, "Exploring the limits of transfer learning with a unified text-to-text transformer".
    """

    loss_weighting = "tokens"  # the loss function returns (sum, count)

    def __init__(self, sizes: T5ModelArgs, place: ParallelContext | None = None) -> None:
        super().__init__()
        self.sizes = sizes
        self.place = place or ParallelContext()
        self.embedding = T5Embedding(sizes, self.place)
        self.encoder = T5Encoder(sizes, self.place)
        self.decoder = T5Decoder(sizes, self.place)
        self.head = Head(sizes, self.place) if sizes.untie_embeddings else None

    def units(self) -> list[nn.Module]:
        """Return the modules of ``t5_units``, in order. For a tied head, the last one is the embedding."""
        encoder, decoder = self.encoder, self.decoder
        enc_units = [self.embedding, *encoder.layers, encoder.final_norm]
        dec_units = [self.embedding, *decoder.layers, decoder.final_norm]
        return [*enc_units, *dec_units, self.embedding if self.head is None else self.head]

    def biases_by_unit(self) -> dict[int, nn.Module | None]:
        """Return the relative bias of each layer, by unit index."""
        units = t5_units(self.sizes.enc_layers, self.sizes.dec_layers)
        enc_biases = dict.fromkeys(units.enc_layers, self.encoder.bias)
        return enc_biases | dict.fromkeys(units.dec_layers, self.decoder.bias)

    def forward(
        self,
        enc_tokens: torch.Tensor,
        dec_tokens: torch.Tensor,
        enc_segments: torch.Tensor | None = None,
        dec_segments: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        rows, table = self._word_table()
        x = self.embedding(enc_tokens, enc_segments, side="encoder", table=rows)
        memory = entered(self.encoder(x, enc_segments), self.place)  # [s_e, b, h]
        y = self.embedding(dec_tokens, dec_segments, side="decoder", table=rows)
        y = self.decoder(y, memory, enc_segments, dec_segments)
        logits = tied_logits(y, table, self.sizes, self.place) if self.head is None else self.head(y)  # [s_d, b, v/t]
        if labels is None or loss_mask is None:
            return materialize_logits(logits)
        return model_loss(logits, labels, loss_mask, self.sizes, self.place)

    def _word_table(self) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the word table for look-ups and for the head.

        Look-ups use a separate view (see ``shared_table``) if the table is unsharded, on a CPU and not 16-bit.
        Otherwise the first value is None.
        """
        weight = self.embedding.word.weight
        is_unsharded = self.place.group.size == 1 and weight.device.type == "cpu"
        return shared_table(weight) if is_unsharded and weight.dtype not in HALF_PRECISION else (None, weight)


def entered(memory: torch.Tensor, place: ParallelContext) -> torch.Tensor:
    """Return the encoder's output for the decoder layers; with sequence parallelism, gather it once for all of them.

    The output's gradient on a rank is a partial sum. It is accumulated over all layers and then reduced over the ranks.

    Shapes:
        memory [s_e, b, h], or this rank's shard of the sequence, depending on ``place``
        output [s_e, b, h]
    """
    return gather_from_sequence_region(memory, place.group) if place.sequence_parallel else memory


class T5Side(nn.Module):
    """The layers of one side, their shared relative bias and the final norm."""

    def __init__(self, sizes: T5ModelArgs, place: ParallelContext, side: str, layers: list[nn.Module]) -> None:
        super().__init__()
        self.recompute = Recompute(sizes, place, num_layers=len(layers))
        is_bidirectional = side == "encoder"
        self.bias = RelativeBias(sizes, place, is_bidirectional) if sizes.is_relative else None
        self.layers = nn.ModuleList(layers)
        self.final_norm = make_final_norm(sizes, place, side)

    def run(self, x: torch.Tensor, *others: torch.Tensor | nn.Module | None) -> torch.Tensor:
        """Apply all layers, each called with ``others`` as further inputs, and the final norm."""
        x = run_layers(list(self.layers), x, *others, recompute=self.recompute)
        return self.final_norm(x)


class T5Encoder(T5Side):
    """T5's encoder; shapes as in ``T5EncoderLayer``."""

    def __init__(self, sizes: T5ModelArgs, place: ParallelContext) -> None:
        layers = [T5EncoderLayer(sizes, place, i) for i in range(sizes.enc_layers)]
        super().__init__(sizes, place, "encoder", list(layers))

    def forward(self, x: torch.Tensor, segments: torch.Tensor | None = None) -> torch.Tensor:
        return self.run(x, self.bias, segments)


class T5Decoder(T5Side):
    """T5's decoder; shapes as in ``T5DecoderLayer``."""

    def __init__(self, sizes: T5ModelArgs, place: ParallelContext) -> None:
        layers = [T5DecoderLayer(sizes, place, sizes.enc_layers + i) for i in range(sizes.dec_layers)]
        super().__init__(sizes, place, "decoder", list(layers))
        self.shares = (1,) if place.sequence_parallel else ()  # for the debugger: memory's gradient is a partial sum

    def forward(
        self,
        x: torch.Tensor,
        memory: torch.Tensor,
        enc_segments: torch.Tensor | None = None,
        dec_segments: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.run(x, memory, self.bias, enc_segments, dec_segments)


def model_args(config: Config, *, recomputes: bool = False) -> T5ModelArgs:
    """Return the ``T5ModelArgs`` of ``config``.

    Args:
        recomputes: apply the activation recomputation settings of the run; otherwise nothing is recomputed.
    """
    switches = recompute_switches(config) if recomputes else {}
    return t5_model_args_from(config.model, config.own, **switches)


def weight_init(config: Config) -> Rule:
    """Return the rule for the standard deviation of the initial weights."""
    return t5_rule(model_args(config), config.model.init_method_std, is_given="init_method_std" in config.given)


def example_inputs(config: Config, words: Callable[[int], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return example inputs of a T5 without labels; ``words(length)`` draws tokens [b, length]."""
    return {"enc_tokens": words(config.own.enc_seq_length), "dec_tokens": words(config.own.dec_seq_length)}


MODEL = ModelParts(args=model_args, model=T5Model, weight_init=weight_init, example_inputs=example_inputs)
