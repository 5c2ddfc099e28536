"""What a T5 costs. Its units: encoder embedding, Le layers and norm; decoder embedding, Ld layers and norm; head.

| unit | FLOPs of a sample, forward |
|---|---|
| encoder layer | s_e (8 h a d + 4 h f) + 4 s_e^2 a d |
| decoder layer | s_d (8 h a d + 4 h f) + 4 s_d^2 a d |
| its cross attention | 4 s_d h a d + 4 s_e h a d + 4 s_d s_e a d |
| head | 2 s_d h v |

A gated feed-forward layer has 6 h f in place of 4 h f. Scores count in full, though the decoder's are causal. At equal
lengths a decoder layer costs 1.4 to 1.5 encoder layers, at 512 and 114 tokens 0.4.

The word table is shared by both embeddings and a tied head, the position table by both embeddings, a relative bias
table by all layers of its side: each stage that has any of them holds it once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.costs import decoder_cost
from megatron.costs.cost import OPERATIONS, Costs, Kept, Product, Shared, Work, scores
from megatron.costs.decoder_cost import ELEMENTWISE, KEPT, dropout_costs
from megatron.costs.dimensions import ModelDimensions, known_vocab_size
from megatron.costs.memory import loss_bytes
from megatron.models.t5.config import T5LayerOrder, t5_units
from tds.partition import partition_balanced, partition_balanced_chunks
from tds.schedule import LOOP


class Sides(Protocol):
    """What is read of the two sides; ``T5Config`` has it."""

    @property
    def enc_layers(self) -> int: ...
    @property
    def dec_layers(self) -> int: ...
    @property
    def enc_seq_length(self) -> int: ...
    @property
    def dec_seq_length(self) -> int: ...
    @property
    def relative_attention_num_buckets(self) -> int: ...
    @property
    def pipeline_split_rank(self) -> int: ...


@dataclass(frozen=True)
class T5Costs(Costs):
    """The costs of a T5 of ``sizes`` (``num_layers`` is not read) with the two ``sides``.

    Args:
        has_segments: batches carry segments, so that each sample has a mask of its own.
        mask_bytes: of an element of a mask of hidden dropout; 0: nothing is dropped.
        is_blocked: attention in 32 bits and more goes block by block, as on a CPU without dropout of attention.
    """

    sizes: ModelDimensions
    sides: Sides
    has_segments: bool = False
    is_blocked: bool = False
    mask_bytes: int = 1
    is_on_cpu: bool = field(default=False, compare=False)

    @property
    def unit_names(self) -> list[str]:
        encoder = [f"encoder {number}" for number in range(self.sides.enc_layers)]
        decoder = [f"decoder {number}" for number in range(self.sides.dec_layers)]
        return [
            *("encoder embedding", *encoder, "encoder norm"),
            *("decoder embedding", *decoder, "decoder norm", "head"),
        ]

    @property
    def unit_costs(self) -> list[float]:
        enc, dec = self._layer_flops()
        read = ELEMENTWISE * self.sizes.hidden_size
        ends = self.sides.enc_seq_length * read / enc, self.sides.dec_seq_length * read / enc
        head = self.sides.dec_seq_length * decoder_cost.head_cost(self.sizes) / enc
        encoder = [ends[0], *[1.0] * self.sides.enc_layers, ends[0]]
        return [*encoder, ends[1], *[dec / enc] * self.sides.dec_layers, ends[1], head]

    @property
    def flops_per_sample(self) -> float:
        enc, dec = self._layer_flops()
        head = 2 * self.sides.dec_seq_length * self.sizes.hidden_size * known_vocab_size(self.sizes)
        return 3.0 * (self.sides.enc_layers * enc + self.sides.dec_layers * dec + head)

    def unit_parameters(self, tensor: int = 1) -> list[int]:
        sizes = self.sizes
        norm = sizes.hidden_size * (1 if sizes.has_relative_positions else 2)
        attention = decoder_cost.attention_parameters(sizes, tensor)
        encoder_layer = attention + decoder_cost.feed_forward_parameters(sizes, tensor) + 2 * norm
        head = decoder_cost.table_parameters(sizes, tensor) if sizes.untie_embeddings else 0
        encoder = [0, *[encoder_layer] * self.sides.enc_layers, norm]
        return [*encoder, 0, *[encoder_layer + attention + norm] * self.sides.dec_layers, norm, head]

    def shared_parameters(self, tensor: int = 1) -> list[Shared]:
        sizes, sides, units = self.sizes, self.sides, self._units
        embeddings = (units.enc_embedding, units.dec_embedding)
        words = embeddings if sizes.untie_embeddings else (*embeddings, units.head)
        word = Shared(decoder_cost.table_parameters(sizes, tensor), words)
        if not sizes.has_relative_positions:
            return [word, Shared(sizes.max_position_embeddings * sizes.hidden_size, embeddings)]
        bias = sides.relative_attention_num_buckets * sizes.num_attention_heads // tensor
        return [word, Shared(bias, tuple(units.enc_layers)), Shared(bias, tuple(units.dec_layers))]

    def unit_kept(
        self, samples: int, tensor: int, width: int, sequence: int = 1, *, is_joined: bool = False
    ) -> list[Kept]:
        encoder = self._encoder_kept(samples, tensor, width, sequence, is_joined)
        decoder = self._decoder_kept(samples, tensor, width, sequence, is_joined)
        ends = [Kept(), Kept()]
        hidden = samples * self.sides.dec_seq_length * self.sizes.hidden_size * width
        return [
            Kept(),
            *[encoder] * self.sides.enc_layers,
            *ends,
            *[decoder] * self.sides.dec_layers,
            Kept(hidden // sequence),
            Kept(hidden),
        ]

    def unit_work(self, samples: int, tensor: int, width: int) -> list[Work]:
        """A decoder layer sums three times; back also the gradient of the encoder's output, which it reads."""
        sizes, sides, h = self.sizes, self.sides, self.sizes.hidden_size
        enc, dec = samples * sides.enc_seq_length, samples * sides.dec_seq_length
        read, written = enc * h * width, dec * h * width
        encoder = Work(
            products=decoder_cost.layer_products(sizes, enc, tensor),
            core=self._scores(samples, tensor, sides.enc_seq_length, sides.enc_seq_length),
            operations=OPERATIONS["layer"],
            sums=(read,) * 2,
            back=(read,) * 2,
        )
        decoder = Work(
            products=(*decoder_cost.layer_products(sizes, dec, tensor), *self._cross_products(dec, enc, tensor)),
            core=(
                *self._scores(samples, tensor, sides.dec_seq_length, sides.dec_seq_length),
                *self._scores(samples, tensor, sides.dec_seq_length, sides.enc_seq_length),
            ),
            operations=OPERATIONS["decoder"],
            sums=(written,) * 3,
            back=(written,) * 3 + (read,),
        )
        norm = Work(operations=OPERATIONS["norm"])
        embeddings = [Work(operations=OPERATIONS["embedding"], sums=(size,)) for size in (read, written)]
        head = Work(
            products=(Product(dec, h, -(-known_vocab_size(sizes) // tensor)),),
            operations=OPERATIONS["head"],
            sums=(4 * dec,) * 3,
            back=(written,),
        )
        encoders, decoders = [encoder] * sides.enc_layers, [decoder] * sides.dec_layers
        return [embeddings[0], *encoders, norm, embeddings[1], *decoders, norm, head]

    def boundary_bytes(self, bound: int, samples: int, width: int) -> int:
        """Behind the seam the encoder's output goes with the decoder's hidden state; at it, alone."""
        of_token = samples * self.sizes.hidden_size * width
        enc, dec = self.sides.enc_seq_length * of_token, self.sides.dec_seq_length * of_token
        return enc + (dec if bound > self._units.dec_embedding else 0)

    def _cross_products(self, queries: int, keys: int, tensor: int) -> tuple[Product, ...]:
        h, width = self.sizes.hidden_size, decoder_cost.attention_width(self.sizes) // tensor
        entering = Product(queries, h, width, is_column=True), Product(keys, h, 2 * width, is_column=True)
        return *entering, Product(queries, width, h)

    def _scores(self, samples: int, tensor: int, queries: int, keys: int) -> tuple[Product, ...]:
        number = samples * self.sizes.num_attention_heads / tensor
        return scores(queries, keys, self.sizes.kv_hidden_size, number)

    def shared_kept(self, samples: int, tensor: int, width: int) -> list[Shared]:
        """The encoder's output, which all decoder layers of a piece read."""
        output = samples * self.sides.enc_seq_length * self.sizes.hidden_size * width
        return [Shared(output, tuple(self._units.dec_layers))]

    def logit_bytes(self, samples: int, tensor: int, width: int) -> int:
        return samples * self.sides.dec_seq_length * -(-known_vocab_size(self.sizes) // tensor) * (width + 4)

    def loss_bytes(self, samples: int, tensor: int, width: int, *, forwards: int = 1) -> int:
        tokens = samples * self.sides.dec_seq_length
        return loss_bytes(self.sizes, tokens, tensor, width, forwards=forwards, is_on_cpu=self.is_on_cpu)

    def stage_bounds(self, stages: int, chunks: int = 1, placement: str = LOOP) -> list[int]:
        """As ``Costs`` says; with ``pipeline_split_rank`` the decoder's embedding is the first unit of that stage."""
        enc_layers, rank = self.sides.enc_layers, self.sides.pipeline_split_rank
        if stages == 1:
            return [0, self.num_units]
        layers = self._costs_by_layer()
        if chunks > 1:
            cut = partition_balanced_chunks(layers, stages, chunks, placement)
        elif rank:
            decoder = partition_balanced(layers[enc_layers:], stages - rank)
            cut = [*partition_balanced(layers[:enc_layers], rank)[:-1], *[enc_layers + bound for bound in decoder]]
        else:
            cut = partition_balanced(layers, stages)
        return [0, *[self._unit_before(layer) for layer in cut[1:-1]], self.num_units]

    @property
    def _units(self) -> T5LayerOrder:
        return t5_units(self.sides.enc_layers, self.sides.dec_layers)

    def _unit_before(self, layer: int) -> int:
        """Return the first unit of a piece that begins with ``layer``, counted over both sides."""
        units, of_decoder = self._units, layer - self.sides.enc_layers
        if of_decoder < 0:
            return units.enc_layers[layer]
        return units.dec_layers[of_decoder] if of_decoder else units.dec_embedding

    def _costs_by_layer(self) -> list[float]:
        """Return the cost of each layer of both sides, with the units that always lie beside it."""
        costs, seam = self.unit_costs, self._units.dec_embedding
        encoder, decoder = costs[:seam], costs[seam:-1]
        decoder[-1] += costs[-1]  # the head follows the decoder's norm
        layers = []
        for first, *inner, last in (encoder, decoder):
            inner[0] += first
            inner[-1] += last
            layers += inner
        return layers

    def _layer_flops(self) -> tuple[int, int]:
        """Return the forward FLOPs of a sample in an encoder layer and in a decoder layer."""
        enc, dec = self.sides.enc_seq_length, self.sides.dec_seq_length
        width, own = decoder_cost.attention_width(self.sizes), decoder_cost.projections_flops(self.sizes)
        of_token = own + decoder_cost.feed_forward_flops(self.sizes)
        cross = (dec + enc) * own // 2 + 4 * dec * enc * width
        return enc * of_token + 4 * enc * enc * width, dec * of_token + 4 * dec * dec * width + cross

    def _encoder_kept(self, samples: int, tensor: int, width: int, sequence: int, is_joined: bool) -> Kept:
        h, length, heads = self.sizes.hidden_size, self.sides.enc_seq_length, decoder_cost.attention_width(self.sizes)
        whole = decoder_cost.between_bytes(2 * h * width, 2 * h * self.mask_bytes, sequence, is_joined=is_joined)
        cut = (4 * heads + decoder_cost.feed_forward_kept(self.sizes)) * width
        tokens = samples * length
        own = self._scores_kept(samples, length, length, tensor, width)
        return Kept(tokens * (whole + cut // tensor) + own, tokens * h * width // sequence)

    def _decoder_kept(self, samples: int, tensor: int, width: int, sequence: int, is_joined: bool) -> Kept:
        """Three parts read the decoder's side; keys and values of cross attention are as long as the encoder's."""
        h, length, heads = self.sizes.hidden_size, self.sides.dec_seq_length, decoder_cost.attention_width(self.sizes)
        whole = decoder_cost.between_bytes(3 * h * width, 3 * h * self.mask_bytes, sequence, is_joined=is_joined)
        cut = (6 * heads + decoder_cost.feed_forward_kept(self.sizes)) * width
        tokens, cross = samples * length, samples * self.sides.enc_seq_length * 2 * heads * width // tensor
        own = self._scores_kept(samples, length, length, tensor, width)
        to_encoder = self._scores_kept(samples, length, self.sides.enc_seq_length, tensor, width, is_cross=True)
        kept = tokens * (whole + cut // tensor) + cross + own + to_encoder
        return Kept(kept, tokens * h * width // sequence)

    def _scores_kept(
        self, samples: int, queries: int, keys: int, tensor: int, width: int, *, is_cross: bool = False
    ) -> int:
        """Return the bytes of what one attention keeps with a number for each query and key.

        | attention | keeps |
        |---|---|
        | to itself, learned positions | nothing |
        | blocked | probabilities [b, a/t, s, s_k] up to ``KEPT`` numbers; with segments its mask [b, s, s_k] |
        | to itself, else | the relative bias [a/t, s, s], with segments one for each sample |
        | cross, else | nothing |
        """
        if not is_cross and not self.sizes.has_relative_positions:
            return 0
        square, heads = queries * keys, self.sizes.num_attention_heads // tensor
        masked = samples if self.has_segments else 0
        if self.is_blocked and width >= 4:
            numbers = samples * heads * square
            return (numbers * width if numbers <= KEPT else 0) + masked * square
        return 0 if is_cross else max(masked, 1) * heads * square * width


def costs(config: Any, is_on_cpu: bool = False) -> T5Costs:
    """Return the costs of the model of ``config``, a ``Config``; what it keeps depends on where it is trained."""
    return T5Costs(
        config.model,
        config.own,
        has_segments=config.own.has_segments(config.data.reset_attention_mask),
        is_blocked=is_on_cpu and not config.model.attention_dropout,
        mask_bytes=dropout_costs(config, is_on_cpu)["mask_bytes"],
        is_on_cpu=is_on_cpu,
    )
