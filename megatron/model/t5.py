"""T5 on one pipeline rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron.config import Config
from megatron.model.head import Head, whole_logits
from megatron.model.init import Rule, t5_rule
from megatron.model.loss import model_loss
from megatron.model.recompute import Recompute
from megatron.model.sizes import Place, T5Sizes, t5_sizes_from
from megatron.model.stack import run_layers
from megatron.model.t5_attention import RelativeBias
from megatron.model.t5_embedding import T5Embedding, embed, make_final_norm, make_norm, tied_logits
from megatron.model.t5_layer import T5DecoderLayer, T5EncoderLayer
from megatron.mpu.mappings import gather_from_sequence_region
from megatron.ops.shared_table import shared_table
from megatron.stages import t5_units

__all__ = [
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
    """An encoder-decoder language model, cut over the tensor-parallel group of ``place``.

    | | T5, T5 v1.1, mT5 (relative) | as CPM trained it (learned) |
    |---|---|---|
    | positions | a bias in self-attention, by distance | a table that both sides add to the words |
    | norm | root mean square | mean and variance, with bias |
    | scores | not scaled | times ``d ** -0.5`` |
    | tied head | of ``x h ** -0.5`` | of ``x`` |
    | dropout | also after activations and final norms | of what joins the residual, embeddings, attention |

    Shapes:
        enc_tokens [b, s_e], dec_tokens [b, s_d]
        enc_segments, dec_segments alike, both or none: the document of each position, -1 for padding; given, every
            attention stays within documents, and learned positions start anew in each
        output logits [s_d, b, v/t]; with ``labels`` and ``loss_mask`` [b, s_d] the pair (loss sum, token count)

    Source: Raffel et al. 2020, "Exploring the limits of transfer learning with a unified text-to-text transformer".
    """

    loss_weighting = "tokens"  # for the start table

    def __init__(self, sizes: T5Sizes, place: Place | None = None) -> None:
        super().__init__()
        self.sizes = sizes
        self.place = place or Place()
        self.embedding = T5Embedding(sizes, self.place)
        self.encoder = T5Encoder(sizes, self.place)
        self.decoder = T5Decoder(sizes, self.place)
        self.head = Head(sizes, self.place) if sizes.untie_embeddings else None

    def units(self) -> list[nn.Module]:
        """Return what is cut into pipeline stages, in the order of ``t5_units``; a tied head is the embedding."""
        encoder, decoder = self.encoder, self.decoder
        enc_units = [self.embedding, *encoder.layers, encoder.final_norm]
        dec_units = [self.embedding, *decoder.layers, decoder.final_norm]
        return [*enc_units, *dec_units, self.embedding if self.head is None else self.head]

    def biases_by_unit(self) -> dict[int, nn.Module | None]:
        """Return the relative bias that each layer takes, by the number of its unit."""
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
            return whole_logits(logits)
        return model_loss(logits, labels, loss_mask, self.sizes, self.place)

    def _word_table(self) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the word table for both embeddings, where it is whole and on a CPU, and for the head."""
        weight = self.embedding.word.weight
        is_whole = self.place.group.size == 1 and weight.device.type == "cpu"
        return shared_table(weight) if is_whole and weight.dtype != torch.float16 else (None, weight)


def entered(memory: torch.Tensor, place: Place) -> torch.Tensor:
    """Return the encoder's output as all layers of the decoder read it: joined once, where each rank has its part.

    What flows back into it is this rank's share of the gradient; the sum over all layers is summed over the ranks.

    Shapes:
        memory [s_e, b, h], or this rank's part of it, by ``place``
        output [s_e, b, h]
    """
    return gather_from_sequence_region(memory, place.group) if place.sequence_parallel else memory


class T5Side(nn.Module):
    """The layers of a side, the bias that they share, and the norm after them."""

    def __init__(self, sizes: T5Sizes, place: Place, side: str, layers: list[nn.Module]) -> None:
        super().__init__()
        self.recompute = Recompute(sizes, place, num_layers=len(layers))
        is_bidirectional = side == "encoder"
        self.bias = RelativeBias(sizes, place, is_bidirectional) if sizes.is_relative else None
        self.layers = nn.ModuleList(layers)
        self.final_norm = make_final_norm(sizes, place, side)

    def run(self, x: torch.Tensor, *others: torch.Tensor | nn.Module | None) -> torch.Tensor:
        """Return ``x`` after all layers, each of which takes ``others`` too, and the norm."""
        x = run_layers(list(self.layers), x, *others, recompute=self.recompute)
        return self.final_norm(x)


class T5Encoder(T5Side):
    """Shapes as ``T5EncoderLayer``."""

    def __init__(self, sizes: T5Sizes, place: Place) -> None:
        layers = [T5EncoderLayer(sizes, place, i) for i in range(sizes.enc_layers)]
        super().__init__(sizes, place, "encoder", list(layers))

    def forward(self, x: torch.Tensor, segments: torch.Tensor | None = None) -> torch.Tensor:
        return self.run(x, self.bias, segments)


class T5Decoder(T5Side):
    """Shapes as ``T5DecoderLayer``."""

    def __init__(self, sizes: T5Sizes, place: Place) -> None:
        layers = [T5DecoderLayer(sizes, place, sizes.enc_layers + i) for i in range(sizes.dec_layers)]
        super().__init__(sizes, place, "decoder", list(layers))
        self.shares = (1,) if place.sequence_parallel else ()  # the gradient of memory, for the debugger

    def forward(
        self,
        x: torch.Tensor,
        memory: torch.Tensor,
        enc_segments: torch.Tensor | None = None,
        dec_segments: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.run(x, memory, self.bias, enc_segments, dec_segments)


def model_args(config: Config, **switches: Any) -> T5Sizes:
    """Return the sizes of the model of ``config``; ``switches``: further fields, or others in place of its own."""
    return t5_sizes_from(config.model, config.own, **switches)


def weight_init(config: Config) -> Rule:
    """Return how the initial weights scale."""
    return t5_rule(model_args(config), config.model.init_method_std)


def example_inputs(config: Config, words: Callable[[int], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what it takes beside its labels; ``words(length)`` makes tokens [b, length]."""
    return {"enc_tokens": words(config.own.enc_seq_length), "dec_tokens": words(config.own.dec_seq_length)}
