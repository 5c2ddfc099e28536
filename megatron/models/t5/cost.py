"""T5 costs: parameters, FLOPs, memory and work per unit.

The units are the encoder's embedding, Le layers and norm, the decoder's embedding, Ld layers and norm, and the head.

| unit | forward FLOPs of a sample |
|---|---|
| encoder layer | s_e (8 h a d + 4 h f) + 4 s_e^2 a d |
| decoder layer | s_d (8 h a d + 4 h f) + 4 s_d^2 a d |
| its cross attention | 4 s_d h a d + 4 s_e h a d + 4 s_d s_e a d |
| head | 2 s_d h v |

A gated feed-forward layer has 6 h f instead of 4 h f. Scores are counted in full, although the decoder's are causal. At
equal lengths, a decoder layer costs 1.4 to 1.5 times as much as an encoder layer; with 512 encoder tokens and 114
decoder tokens, 0.4 times as much.

The word table is shared by both embeddings and a tied head, the position table by both embeddings, and a relative bias
table by all layers of its side. A stage with any of these units holds the table once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.costs import decoder_cost
from megatron.costs.cost import OPERATIONS, Costs, Product, SavedBytes, Shared, Work, scores
from megatron.costs.decoder_cost import ELEMENTWISE, MAX_SAVED_PROBABILITIES, dropout_costs, loss_costs
from megatron.costs.dimensions import ModelDimensions, known_vocab_size
from megatron.costs.memoize import memoized_list
from megatron.costs.memory import loss_bytes
from megatron.models.t5.config import T5LayerOrder, t5_units
from tds.partition import partition_balanced, partition_balanced_chunks
from tds.schedule import LOOP


class Sides(Protocol):
    """``T5Config`` attributes that determine the costs."""

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
    """T5 costs.

    Args:
        model: layer dimensions; ``num_layers`` is not used.
        sides: layer counts and sequence lengths for encoder and decoder.
        has_segments: batches have segments, so each sample has a mask.
        mask_bytes: bytes per hidden dropout mask element; 0 without dropout.
        is_blocked: attention in 32 bits or more is computed in blocks, as on a CPU without attention dropout.
        has_loss_kernels: Triton kernels compute the cross-entropy, which saves no softmax.
    """

    model: ModelDimensions
    sides: Sides
    has_segments: bool = False
    is_blocked: bool = False
    mask_bytes: int = 1
    is_on_cpu: bool = field(default=False, compare=False)
    has_loss_kernels: bool = field(default=False, compare=False)

    @property
    def unit_names(self) -> list[str]:
        encoder = [f"encoder {idx}" for idx in range(self.sides.enc_layers)]
        decoder = [f"decoder {idx}" for idx in range(self.sides.dec_layers)]
        return [
            *("encoder embedding", *encoder, "encoder norm"),
            *("decoder embedding", *decoder, "decoder norm", "head"),
        ]

    @property
    def unit_costs(self) -> list[float]:
        enc, dec = self._layer_flops()
        elementwise = ELEMENTWISE * self.model.hidden_size
        ends = self.sides.enc_seq_length * elementwise / enc, self.sides.dec_seq_length * elementwise / enc
        head = self.sides.dec_seq_length * decoder_cost.head_cost(self.model) / enc
        encoder = [ends[0], *[1.0] * self.sides.enc_layers, ends[0]]
        return [*encoder, ends[1], *[dec / enc] * self.sides.dec_layers, ends[1], head]

    @property
    def flops_per_sample(self) -> float:
        enc, dec = self._layer_flops()
        head = 2 * self.sides.dec_seq_length * self.model.hidden_size * known_vocab_size(self.model)
        return 3.0 * (self.sides.enc_layers * enc + self.sides.dec_layers * dec + head)

    @memoized_list
    def unit_parameters(self, tensor: int = 1) -> list[int]:
        model = self.model
        norm = model.hidden_size * (1 if model.has_relative_positions else 2)
        attention = decoder_cost.attention_parameters(model, tensor)
        encoder_layer = attention + decoder_cost.feed_forward_parameters(model, tensor) + 2 * norm
        head = decoder_cost.table_parameters(model, tensor) if model.untie_embeddings else 0
        encoder = [0, *[encoder_layer] * self.sides.enc_layers, norm]
        return [*encoder, 0, *[encoder_layer + attention + norm] * self.sides.dec_layers, norm, head]

    def shared_parameters(self, tensor: int = 1) -> list[Shared]:
        model, sides, units = self.model, self.sides, self._units
        embeddings = (units.enc_embedding, units.dec_embedding)
        words = embeddings if model.untie_embeddings else (*embeddings, units.head)
        word = Shared(decoder_cost.table_parameters(model, tensor), words, embeddings)
        if not model.has_relative_positions:
            positions = model.max_position_embeddings * model.hidden_size
            return [word, Shared(positions, embeddings, embeddings)]
        bias = sides.relative_attention_num_buckets * model.num_attention_heads // tensor
        return [word, Shared(bias, tuple(units.enc_layers)), Shared(bias, tuple(units.dec_layers))]

    @memoized_list
    def unit_saved_bytes(
        self, samples: int, tensor: int, width: int, sequence: int = 1, *, saves_gathered_inputs: bool = False
    ) -> list[SavedBytes]:
        encoder = self._encoder_saved_bytes(samples, tensor, width, sequence, saves_gathered_inputs)
        decoder = self._decoder_saved_bytes(samples, tensor, width, sequence, saves_gathered_inputs)
        ends = [SavedBytes(), SavedBytes()]
        hidden = samples * self.sides.dec_seq_length * self.model.hidden_size * width
        return [
            SavedBytes(),
            *[encoder] * self.sides.enc_layers,
            *ends,
            *[decoder] * self.sides.dec_layers,
            SavedBytes(hidden // sequence),
            SavedBytes(hidden),
        ]

    @memoized_list
    def unit_work(self, samples: int, tensor: int, width: int) -> list[Work]:
        """See ``Costs``.

        A decoder layer has three all-reduces, plus one in backward for the encoder output's gradient.
        """
        model, sides, h = self.model, self.sides, self.model.hidden_size
        enc, dec = samples * sides.enc_seq_length, samples * sides.dec_seq_length
        enc_bytes, dec_bytes = enc * h * width, dec * h * width
        encoder = Work(
            products=decoder_cost.layer_products(model, enc, tensor),
            core=self._scores(samples, tensor, sides.enc_seq_length, sides.enc_seq_length),
            operations=OPERATIONS["layer"],
            reduced_bytes=(enc_bytes,) * 2,
            backward_reduced_bytes=(enc_bytes,) * 2,
        )
        decoder = Work(
            products=(*decoder_cost.layer_products(model, dec, tensor), *self._cross_products(dec, enc, tensor)),
            core=(
                *self._scores(samples, tensor, sides.dec_seq_length, sides.dec_seq_length),
                *self._scores(samples, tensor, sides.dec_seq_length, sides.enc_seq_length),
            ),
            operations=OPERATIONS["decoder"],
            reduced_bytes=(dec_bytes,) * 3,
            backward_reduced_bytes=(dec_bytes,) * 3 + (enc_bytes,),
        )
        norm = Work(operations=OPERATIONS["norm"])
        embeddings = [
            Work(operations=OPERATIONS["embedding"], reduced_bytes=(size,)) for size in (enc_bytes, dec_bytes)
        ]
        head = Work(
            products=(Product(dec, h, -(-known_vocab_size(model) // tensor)),),
            operations=OPERATIONS["head"],
            reduced_bytes=(4 * dec,) * 3,
            backward_reduced_bytes=(dec_bytes,),
        )
        encoders, decoders = [encoder] * sides.enc_layers, [decoder] * sides.dec_layers
        return [embeddings[0], *encoders, norm, embeddings[1], *decoders, norm, head]

    def boundary_bytes(self, bound: int, samples: int, width: int) -> int:
        """Return the bytes sent to the stage that starts with unit ``bound``.

        These are the encoder's hidden states or output and, after the decoder's embedding, the decoder's hidden states.
        """
        bytes_per_token = samples * self.model.hidden_size * width
        enc, dec = self.sides.enc_seq_length * bytes_per_token, self.sides.dec_seq_length * bytes_per_token
        return enc + (dec if bound > self._units.dec_embedding else 0)

    def _cross_products(self, queries: int, keys: int, tensor: int) -> tuple[Product, ...]:
        h, width = self.model.hidden_size, decoder_cost.attention_width(self.model) // tensor
        column_products = Product(queries, h, width, is_column=True), Product(keys, h, 2 * width, is_column=True)
        return *column_products, Product(queries, width, h)

    def _scores(self, samples: int, tensor: int, queries: int, keys: int) -> tuple[Product, ...]:
        num_heads = samples * self.model.num_attention_heads / tensor
        head_sizes = self.model.kv_hidden_size, self.model.value_size
        return scores(queries, keys, *head_sizes, num_heads)

    def shared_saved_bytes(self, samples: int, tensor: int, width: int) -> list[Shared]:
        """Return the encoder output's bytes, which all decoder layers in a chunk share."""
        output = samples * self.sides.enc_seq_length * self.model.hidden_size * width
        return [Shared(output, tuple(self._units.dec_layers))]

    def logit_bytes(self, samples: int, tensor: int, width: int) -> int:
        return samples * self.sides.dec_seq_length * -(-known_vocab_size(self.model) // tensor) * (width + 4)

    def loss_bytes(self, samples: int, tensor: int, width: int, *, forwards: int = 1) -> int:
        tokens = samples * self.sides.dec_seq_length
        return loss_bytes(
            self.model, tokens, tensor, width,
            forwards=forwards, is_on_cpu=self.is_on_cpu, has_kernels=self.has_loss_kernels,
        )  # fmt: skip

    def stage_bounds(self, stages: int, chunks: int = 1, placement: str = LOOP) -> list[int]:
        """See ``Costs``; with ``pipeline_split_rank`` the decoder's embedding is the first unit on that stage."""
        enc_layers, split_rank = self.sides.enc_layers, self.sides.pipeline_split_rank
        if stages == 1:
            return [0, self.num_units]
        layers = self._costs_by_layer()
        if chunks > 1:
            bounds = partition_balanced_chunks(layers, stages, chunks, placement)
        elif split_rank:
            decoder = partition_balanced(layers[enc_layers:], stages - split_rank)
            bounds = [
                *partition_balanced(layers[:enc_layers], split_rank)[:-1],
                *[enc_layers + bound for bound in decoder],
            ]
        else:
            bounds = partition_balanced(layers, stages)
        return [0, *[self._unit_before(layer) for layer in bounds[1:-1]], self.num_units]

    @property
    def _units(self) -> T5LayerOrder:
        return t5_units(self.sides.enc_layers, self.sides.dec_layers)

    def _unit_before(self, layer: int) -> int:
        """Return the first unit in a chunk that starts with ``layer``, an index over both sides' layers."""
        units, dec_layer = self._units, layer - self.sides.enc_layers
        if dec_layer < 0:
            return units.enc_layers[layer]
        return units.dec_layers[dec_layer] if dec_layer else units.dec_embedding

    def _costs_by_layer(self) -> list[float]:
        """Return costs by layer for both sides, including other units that are always on the same stage."""
        costs, dec_embedding = self.unit_costs, self._units.dec_embedding
        encoder, decoder = costs[:dec_embedding], costs[dec_embedding:-1]
        decoder[-1] += costs[-1]  # the head follows the decoder's norm
        layers = []
        for first, *inner, last in (encoder, decoder):
            inner[0] += first
            inner[-1] += last
            layers += inner
        return layers

    def _layer_flops(self) -> tuple[int, int]:
        """Return the forward FLOPs per sample for an encoder layer and a decoder layer."""
        enc, dec = self.sides.enc_seq_length, self.sides.dec_seq_length
        width, projections = decoder_cost.attention_width(self.model), decoder_cost.projections_flops(self.model)
        per_token = projections + decoder_cost.feed_forward_flops(self.model)
        cross = (dec + enc) * projections // 2 + 4 * dec * enc * width
        return enc * per_token + 4 * enc * enc * width, dec * per_token + 4 * dec * dec * width + cross

    def _encoder_saved_bytes(
        self, samples: int, tensor: int, width: int, sequence: int, saves_gathered_inputs: bool
    ) -> SavedBytes:
        h, length, heads = self.model.hidden_size, self.sides.enc_seq_length, decoder_cost.attention_width(self.model)
        unsharded = decoder_cost.between_bytes(
            2 * h * width, 2 * h * self.mask_bytes, sequence, saves_gathered_inputs=saves_gathered_inputs
        )
        sharded = (4 * heads + decoder_cost.feed_forward_saved_numel(self.model)) * width
        tokens = samples * length
        self_scores = self._scores_saved_bytes(samples, length, length, tensor, width)
        return SavedBytes(tokens * (unsharded + sharded // tensor) + self_scores, tokens * h * width // sequence)

    def _decoder_saved_bytes(
        self, samples: int, tensor: int, width: int, sequence: int, saves_gathered_inputs: bool
    ) -> SavedBytes:
        """Return the activation bytes that a decoder layer saves for backward.

        The hidden states are the input to three blocks. Cross-attention keys and values have the encoder's length.
        """
        h, length, heads = self.model.hidden_size, self.sides.dec_seq_length, decoder_cost.attention_width(self.model)
        unsharded = decoder_cost.between_bytes(
            3 * h * width, 3 * h * self.mask_bytes, sequence, saves_gathered_inputs=saves_gathered_inputs
        )
        sharded = (6 * heads + decoder_cost.feed_forward_saved_numel(self.model)) * width
        tokens, cross = samples * length, samples * self.sides.enc_seq_length * 2 * heads * width // tensor
        self_scores = self._scores_saved_bytes(samples, length, length, tensor, width)
        cross_scores = self._scores_saved_bytes(
            samples, length, self.sides.enc_seq_length, tensor, width, is_cross=True
        )
        saved_bytes = tokens * (unsharded + sharded // tensor) + cross + self_scores + cross_scores
        return SavedBytes(saved_bytes, tokens * h * width // sequence)

    def _scores_saved_bytes(
        self, samples: int, queries: int, keys: int, tensor: int, width: int, *, is_cross: bool = False
    ) -> int:
        """Return the bytes in query-by-key tensors that one attention saves for backward.

        | attention | saved |
        |---|---|
        | self-attention, learned positions | nothing |
        | in blocks | probabilities [b, a/t, s, s_k] up to ``MAX_SAVED_PROBABILITIES`` elements; with segments a mask |
        | other self-attention | relative bias [a/t, s, s]; with segments one per sample |
        | other cross-attention | nothing |
        """
        if not is_cross and not self.model.has_relative_positions:
            return 0
        num_scores, heads = queries * keys, self.model.num_attention_heads // tensor
        num_masks = samples if self.has_segments else 0
        if self.is_blocked and width >= 4:
            num_elements = samples * heads * num_scores
            return (num_elements * width if num_elements <= MAX_SAVED_PROBABILITIES else 0) + num_masks * num_scores
        return 0 if is_cross else max(num_masks, 1) * heads * num_scores * width


def costs(config: Any, is_on_cpu: bool = False) -> T5Costs:
    """Return the costs for the model in ``config``; saved activations depend on ``is_on_cpu``."""
    return T5Costs(
        config.model,
        config.family_config,
        has_segments=config.family_config.has_segments(config.data.reset_attention_mask),
        is_blocked=is_on_cpu and not config.model.attention_dropout,
        mask_bytes=dropout_costs(config, is_on_cpu)["mask_bytes"],
        **loss_costs(config, is_on_cpu),
    )
