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
from megatron.models.common.model_args import select_fields
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
        output [s, b, h], or this rank's sequence shard, depending on ``parallel``

    ``side``, "encoder" or "decoder", selects the dropout masks.
    """

    def __init__(self, args: T5ModelArgs, parallel: ParallelContext) -> None:
        super().__init__()
        self.model_args, self.parallel = args, parallel
        self.word = VocabParallelEmbedding(
            args.vocab_size, args.hidden_size, divisible_by=args.make_vocab_size_divisible_by, **parallel.layer_kwargs
        )
        table_shape = (args.max_position_embeddings, args.hidden_size)
        self.position = None if args.is_relative else parallel.mark_sequence_parallel(PositionEmbedding(*table_shape))

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
            args=self.model_args,
            parallel=self.parallel,
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
    args: T5ModelArgs,
    parallel: ParallelContext,
    side: str,
    training: bool,
    segments: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the input hidden states for ``side``; learned positions restart in each segment.

    Shapes:
        tokens, segments [b, s]
        output [s, b, h], or this rank's sequence shard, depending on ``parallel``

    Args:
        table: full word table from ``shared_table``, for row look-ups instead of calling ``word``.
    """
    x = word(tokens.t()) if table is None else F.embedding(tokens.t(), table, sparse=True)  # [s, b, h]
    if position is not None:
        if segments is None:
            x = x + position(parallel.shard_sequence(torch.arange(tokens.shape[1], device=tokens.device))).unsqueeze(1)
        else:
            x = x + position(parallel.shard_sequence(positions_in_segments(segments).t()))
    return parallel.dropout(x, args.hidden_dropout, training=training, layer=-1, site=f"{side} embedding")


def make_final_norm(args: T5ModelArgs, parallel: ParallelContext, side: str) -> nn.Module:
    """Build the final norm for ``side``; with relative positions it is followed by dropout."""
    return FinalRMSNorm(args, parallel, side) if args.is_relative else make_norm(args, parallel)


class FinalRMSNorm(RMSNorm):
    """A side's final norm, followed by dropout.

    Shapes:
        input, output [s, b, h]
    """

    def __init__(self, args: T5ModelArgs, parallel: ParallelContext, side: str) -> None:
        super().__init__(args.hidden_size, args.layernorm_epsilon)
        self.dropout, self.parallel, self.side = args.hidden_dropout, parallel, side
        parallel.mark_sequence_parallel(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parallel.dropout(
            super().forward(x), self.dropout, training=self.training, layer=-1, site=f"{self.side} final norm"
        )


def tied_logits(x: torch.Tensor, weight: torch.Tensor, args: T5ModelArgs, parallel: ParallelContext) -> Logits:
    """Compute logits with a head tied to the word table; with relative positions ``x`` is scaled by ``h ** -0.5``.

    Shapes:
        x      [s, b, h], or this rank's sequence shard, depending on ``parallel``
        weight [v/t, h]
        output [s, b, v/t], or ``LazyLogits``

    Source: Raffel et al.'s code, for weights with variance 1; the papers do not mention it.
    """
    if args.is_relative:
        x = x * args.hidden_size**-0.5
    return head_output(x, weight, args, parallel)


def t5_model_args_from(model: Any, t5: Any, **overrides: Any) -> T5ModelArgs:
    """Build ``T5ModelArgs`` from the configuration sections ``model`` and ``t5``."""
    return T5ModelArgs(**{**select_fields(T5ModelArgs, model), **select_fields(T5ModelArgs, t5), **overrides})


def t5_rule(args: T5ModelArgs, std: float, *, is_explicit: bool = False) -> Rule:
    """Return the rule for T5's initial weights.

    The variant with learned positions, and any variant if ``std`` was set explicitly (``is_explicit``), use GPT-2's
    rule. Otherwise, with relative positions, the standard deviation is 1 for tables, ``n ** -0.5`` for a linear layer
    with n inputs, and ``(h d) ** -0.5`` for queries, because scores are not scaled. These are the factors of Hugging
    Face's ``_init_weights``.

    Source: Raffel et al. 2020, code; Shazeer and Stern 2018, "Adafactor".
    """
    if is_explicit or not args.is_relative:
        sides = {"encoder": gpt2_rule(std, args.enc_layers), "decoder": gpt2_rule(std, args.dec_layers)}
        return lambda name, shape: sides.get(name.partition(".")[0], sides["encoder"])(name, shape)
    default_std = args.hidden_size**-0.5
    query_std = (args.hidden_size * args.kv_hidden_size) ** -0.5

    def rule(name: str, shape: tuple[int, ...]) -> float | torch.Tensor:
        if name in ("embedding.word.weight", "head.weight"):
            return 1.0
        if name.endswith(".query_key_value.weight"):  # rows of a head: query, key, value
            head = torch.tensor([query_std, default_std, default_std]).repeat_interleave(args.kv_hidden_size)
            return head.repeat(args.num_attention_heads).unsqueeze(1)
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
    "example_inputs",
    "gather_memory",
    "make_final_norm",
    "make_norm",
    "model_args",
    "tied_logits",
    "weight_init",
]


class T5Model(nn.Module):
    """Encoder-decoder language model, sharded over the tensor-parallel group of ``parallel``.

    | | T5, T5 v1.1, mT5 (relative) | CPM's variant (learned) |
    |---|---|---|
    | positions | bias in self-attention by distance | table added to the word embeddings of both sides |
    | norm | RMSNorm | LayerNorm with bias |
    | scores | not scaled | scaled by ``d ** -0.5`` |
    | input of a tied head | ``x h ** -0.5`` | ``x`` |
    | dropout | as in CPM's variant, and after activations and final norms | residual branches, embeddings, attention |

    Shapes:
        enc_tokens [b, s_e], dec_tokens [b, s_d]
        enc_segments, dec_segments with the same shapes, both or none: document by position, -1 for padding. If given,
            attention stays within documents, and learned positions restart in each document
        output logits [s_d, b, v/t]; with ``labels`` and ``loss_mask`` [b, s_d] the pair (loss sum, token count)

    Source: Raffel et al. 2020, "Exploring the limits of transfer learning with a unified text-to-text transformer".
    """

    loss_weighting = "tokens"  # the loss function returns (sum, count)

    def __init__(self, args: T5ModelArgs, parallel: ParallelContext | None = None) -> None:
        super().__init__()
        self.model_args = args
        self.parallel = parallel or ParallelContext()
        self.embedding = T5Embedding(args, self.parallel)
        self.encoder = T5Encoder(args, self.parallel)
        self.decoder = T5Decoder(args, self.parallel)
        self.head = Head(args, self.parallel) if args.untie_embeddings else None

    def units(self) -> list[nn.Module]:
        """List the modules for ``t5_units``, in order. For a tied head, the last one is the embedding."""
        encoder, decoder = self.encoder, self.decoder
        enc_units = [self.embedding, *encoder.layers, encoder.final_norm]
        dec_units = [self.embedding, *decoder.layers, decoder.final_norm]
        return [*enc_units, *dec_units, self.embedding if self.head is None else self.head]

    def biases_by_unit(self) -> dict[int, nn.Module | None]:
        """Map unit indices to relative biases."""
        units = t5_units(self.model_args.enc_layers, self.model_args.dec_layers)
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
        lookup_table, table = self._word_table()
        x = self.embedding(enc_tokens, enc_segments, side="encoder", table=lookup_table)
        memory = gather_memory(self.encoder(x, enc_segments), self.parallel)  # [s_e, b, h]
        y = self.embedding(dec_tokens, dec_segments, side="decoder", table=lookup_table)
        y = self.decoder(y, memory, enc_segments, dec_segments)
        logits = (
            tied_logits(y, table, self.model_args, self.parallel) if self.head is None else self.head(y)
        )  # [s_d, b, v/t]
        if labels is None or loss_mask is None:
            return materialize_logits(logits)
        return model_loss(logits, labels, loss_mask, self.model_args, self.parallel)

    def _word_table(self) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the word table for look-ups and for the head.

        Look-ups use a separate view (see ``shared_table``) if the table is unsharded, on a CPU and not 16-bit.
        Otherwise the first value is None.
        """
        weight = self.embedding.word.weight
        is_unsharded = self.parallel.group.size == 1 and weight.device.type == "cpu"
        return shared_table(weight) if is_unsharded and weight.dtype not in HALF_PRECISION else (None, weight)


def gather_memory(memory: torch.Tensor, parallel: ParallelContext) -> torch.Tensor:
    """Prepare the encoder's output for the decoder layers; with sequence parallelism, gather it once for all layers.

    The output's gradient on a rank is a partial sum, accumulated over all layers and then reduced over ranks.

    Shapes:
        memory [s_e, b, h], or this rank's sequence shard, depending on ``parallel``
        output [s_e, b, h]
    """
    return gather_from_sequence_region(memory, parallel.group) if parallel.sequence_parallel else memory


class T5Side(nn.Module):
    """One side's layers, their shared relative bias and the final norm."""

    def __init__(self, args: T5ModelArgs, parallel: ParallelContext, side: str, layers: list[nn.Module]) -> None:
        super().__init__()
        self.recompute = Recompute(args, parallel, num_layers=len(layers))
        is_bidirectional = side == "encoder"
        self.bias = RelativeBias(args, parallel, is_bidirectional) if args.is_relative else None
        self.layers = nn.ModuleList(layers)
        self.final_norm = make_final_norm(args, parallel, side)

    def run(self, x: torch.Tensor, *extra_inputs: torch.Tensor | nn.Module | None) -> torch.Tensor:
        """Apply all layers, each called with ``extra_inputs`` as additional inputs, and the final norm."""
        x = run_layers(list(self.layers), x, *extra_inputs, recompute=self.recompute)
        return self.final_norm(x)


class T5Encoder(T5Side):
    """T5's encoder; shapes as in ``T5EncoderLayer``."""

    def __init__(self, args: T5ModelArgs, parallel: ParallelContext) -> None:
        layers = [T5EncoderLayer(args, parallel, i) for i in range(args.enc_layers)]
        super().__init__(args, parallel, "encoder", list(layers))

    def forward(self, x: torch.Tensor, segments: torch.Tensor | None = None) -> torch.Tensor:
        return self.run(x, self.bias, segments)


class T5Decoder(T5Side):
    """T5's decoder; shapes as in ``T5DecoderLayer``."""

    def __init__(self, args: T5ModelArgs, parallel: ParallelContext) -> None:
        layers = [T5DecoderLayer(args, parallel, args.enc_layers + i) for i in range(args.dec_layers)]
        super().__init__(args, parallel, "decoder", list(layers))
        self.shares = (1,) if parallel.sequence_parallel else ()  # for the debugger: memory's gradient is a partial sum

    def forward(
        self,
        x: torch.Tensor,
        memory: torch.Tensor,
        enc_segments: torch.Tensor | None = None,
        dec_segments: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.run(x, memory, self.bias, enc_segments, dec_segments)


def model_args(config: Config, *, for_training: bool = False) -> T5ModelArgs:
    """Build ``T5ModelArgs`` from ``config``.

    Args:
        for_training: apply the run's settings of activation recomputation.
    """
    switches = recompute_switches(config) if for_training else {}
    return t5_model_args_from(config.model, config.family_config, **switches)


def weight_init(config: Config) -> Rule:
    """Return the rule for the standard deviation of initial weights."""
    return t5_rule(
        model_args(config), config.model.init_method_std, is_explicit="init_method_std" in config.explicit_fields
    )


def example_inputs(config: Config, draw_tokens: Callable[[int], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make example inputs for T5 without labels; ``draw_tokens(length)`` draws tokens [b, length]."""
    return {
        "enc_tokens": draw_tokens(config.family_config.enc_seq_length),
        "dec_tokens": draw_tokens(config.family_config.dec_seq_length),
    }


MODEL = ModelParts(args=model_args, model=T5Model, weight_init=weight_init, example_inputs=example_inputs)
