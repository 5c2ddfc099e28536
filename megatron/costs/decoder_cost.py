"""Parameters, FLOPs and saved activations in a decoder (DecoderCosts). Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar, TypeVar

from megatron.config.decoder import ALIBI, SEQUENTIAL, SHARED_NORM, has_sinks, window_pattern
from megatron.config.layer_features import LEARNABLE, VANILLA, has_rotary
from megatron.config.layer_types import EXPERTS, MLP, NO_MLP, LayerType, has_attention, layer_types
from megatron.config.optimizer import ROWWISE
from megatron.config.recurrent import norm_placement_of
from megatron.costs import memory
from megatron.costs.cost import OPERATIONS, Costs, Product, SavedBytes, Shared, Work, flops_of, scores
from megatron.costs.dimensions import Features, ModelDimensions, known_vocab_size
from megatron.costs.expert_cost import ExpertCosts
from megatron.costs.latent_cost import LatentCosts
from megatron.costs.memoize import memoized_list
from megatron.costs.memory import BYTES, FP8_RATE_RATIO, Memory, loss_bytes
from megatron.costs.recurrent_cost import COSTS, RecurrentCosts
from tds.partition import partition_balanced, partition_uniform_chunks
from tds.schedule import LOOP

# Layer components that all model families share: parameters, products and saved activations.
#
# | component | parameters in products | FLOPs per token in forward |
# |---|---|---|
# | attention | 4 h a d: queries, keys, values, output | 8 h a d, and 4 s a d for scores and weighted sums |
# | feed-forward | 2 h f; gated 3 h f | 4 h f; gated 6 h f |
# | head | h v | 2 h v |

ELEMENTWISE = 64
"""Cost per element of an elementwise pass (norm, softmax), in equivalent FLOPs of a matrix product.

With this value, a head costs as much as 2.77 layers. Measured times are 212 ms for a head and 75 ms for a layer, a
ratio of 2.83 (h 256, v 8192, s 256, two CPU cores).
"""
MAX_SAVED_PROBABILITIES = 2**24
"""Maximum number of probabilities that T5's blocked attention saves, as in ``megatron.ops.biased_attention``."""
QUANTIZATION_FLOPS = 1200
"""Cost per element of quantization to FP8, in equivalent FLOPs of a matrix product.

It is the time of 5 bytes at the memory bandwidth of an H100, at the rate of its products in bf16 (data sheet).
"""
EMULATED_FP8_BYTES = 12
"""Approximate temporary bytes per element of the factors in a product that emulates FP8."""
GATHERED_COPIES = 4
"""Number of tensors of the size of a full sequence's keys and values in backward with context parallelism.

They are the keys and values, their gradients from each of the rank's two query chunks, and the sum of these gradients
in rank order.
"""


def between_bytes(hidden: int, masks: int, sequence: int, *, saves_gathered_inputs: bool = False) -> int:
    """Compute the bytes that a layer saves between products if ``sequence`` ranks shard the activations by token.

    Args:
        hidden: bytes of the norm inputs; the product inputs have the same size.
        masks: dropout mask bytes.
        saves_gathered_inputs: products save their all-gathered inputs instead of gathering them again in backward.
    """
    return hidden + (hidden + masks) // sequence if saves_gathered_inputs else (2 * hidden + masks) // sequence


def attention_width(model: ModelDimensions) -> int:
    """Return the total size of all query heads (a d)."""
    return model.num_attention_heads * model.kv_hidden_size


def context_width(model: ModelDimensions) -> int:
    """Return the total output size of all heads (a d_v)."""
    return model.num_attention_heads * model.value_size


def attention_parameters(
    model: ModelDimensions,
    tensor: int = 1,
    keys_and_values: int | None = None,
    has_entering_bias: bool = False,
    gates: int = 0,
) -> int:
    """Count the attention parameters on one of ``tensor`` ranks; the output bias is not sharded.

    Args:
        keys_and_values: total size of all key and value heads; None: one key and one value head per query head.
        has_entering_bias: the query, key and value projections have biases even without ``hidden_bias``.
        gates: total output gate size.
    """
    entering, leaving = (product.weights for product in attention_products(model, 1, 1, keys_and_values, gates))
    biases = entering // model.hidden_size if model.hidden_bias or has_entering_bias else 0
    return int(entering + leaving + biases) // tensor + (model.hidden_size if model.hidden_bias else 0)


def feed_forward_parameters(model: ModelDimensions, tensor: int = 1) -> int:
    """Count the feed-forward parameters on one of ``tensor`` ranks; the output bias is not sharded."""
    h, f, matrices = model.hidden_size, model.ff_hidden_size, _num_matrices(model)
    sharded = matrices * h * f + ((matrices - 1) * f if model.hidden_bias else 0)
    activation = 2 if model.activation == "xielu" else 0  # its learned parameters
    return sharded // tensor + (h if model.hidden_bias else 0) + activation


def table_parameters(model: ModelDimensions, tensor: int = 1) -> int:
    """Count the parameters in the input embedding, or in an untied head, on one of ``tensor`` ranks."""
    return -(-known_vocab_size(model) // tensor) * model.hidden_size


def projections_flops(model: ModelDimensions, keys_and_values: int | None = None, gates: int = 0) -> int:
    """Count the FLOPs per token in the attention projections (8 h a d); arguments as for ``attention_products``."""
    return int(flops_of(attention_products(model, 1, 1, keys_and_values, gates)))


def feed_forward_flops(model: ModelDimensions) -> int:
    """Count the FLOPs per token in a feed-forward layer: 4 h f, or 6 h f if gated."""
    return 2 * _num_matrices(model) * model.hidden_size * model.ff_hidden_size


def layer_products(
    model: ModelDimensions, tokens: int, tensor: int, keys_and_values: int | None = None, gates: int = 0
) -> tuple[Product, ...]:
    """List a layer's products with weights on one of ``tensor`` ranks: attention and feed-forward."""
    attention = attention_products(model, tokens, tensor, keys_and_values, gates)
    return (*attention, *feed_forward_products(model, tokens, tensor))


def attention_products(
    model: ModelDimensions, tokens: int, tensor: int, keys_and_values: int | None = None, gates: int = 0
) -> tuple[Product, ...]:
    """List two products: the fused query, key and value projection, and the output projection.

    Args:
        keys_and_values: total size of all key and value heads; None: one key and one value head per query head.
        gates: total output gate size, included in the first product.
    """
    h, queries, context = model.hidden_size, attention_width(model), context_width(model)
    entering = queries + (queries + context if keys_and_values is None else keys_and_values) + gates
    return (
        Product(tokens, h, entering // tensor, is_column=True, is_quantizable=True),
        Product(tokens, context // tensor, h, is_quantizable=True),
    )


def feed_forward_products(model: ModelDimensions, tokens: int, tensor: int) -> tuple[Product, ...]:
    """List the two products in a feed-forward layer; a gated layer computes gate and value in one product."""
    h, f = model.hidden_size, model.ff_hidden_size
    entering = Product(tokens, h, (_num_matrices(model) - 1) * f // tensor, is_column=True, is_quantizable=True)
    return entering, Product(tokens, f // tensor, h, is_quantizable=True)


def head_cost(model: ModelDimensions) -> int:
    """Estimate the cost per token for the head and its softmax, in equivalent matrix product FLOPs."""
    return (2 * model.hidden_size + ELEMENTWISE) * known_vocab_size(model)


def feed_forward_saved_numel(model: ModelDimensions) -> int:
    """Count the elements per token that a feed-forward layer saves between its two products.

    They are the activation's input and output (2 f), but only the output with ReLU. A gated layer saves the gate,
    the value, the activated gate and the product; clamped gate and value are saved in addition, and quick-GELU saves
    its logistic function.
    """
    return model.ff_hidden_size * _saved_per_width(model)


def _saved_per_width(model: ModelDimensions) -> int:
    if not _is_gated(model):
        return 1 if model.activation == "relu" else 2
    has_clamp = bool(getattr(model, "activation_func_clamp_value", 0.0))  # T5 has none
    return 4 + 2 * has_clamp + (model.activation == "gated-quick-gelu")


def mean_visible_keys(length: int, window: int = 0) -> float:
    """Average the keys that a query attends to in causal attention.

    Args:
        window: preceding keys that a query attends to; 0: all.
    """
    keys = min(window + 1, length) if window else length
    return keys - keys**2 / (2 * length)


_window_pattern = lru_cache(window_pattern)
UnitValue = TypeVar("UnitValue")


def _num_matrices(model: ModelDimensions) -> int:
    return 3 if _is_gated(model) else 2


def _is_gated(model: ModelDimensions) -> bool:
    return model.activation.startswith("gated-")


# Decoder costs. The units are the embedding, L layers, the final norm and the head. With multi-token prediction,
# the embedding of future tokens and D layers come before the head.
#
# | quantity | formula | remark |
# |---|---|---|
# | N | parameters in matrix products: with the head, without input embeddings | includes a tied head |
# | FLOPs per token, causal half of the scores | 6 N + 6 L a d s | used for our MFU |
# | FLOPs per token, all scores | 12 L a d s instead of 6 L a d s | used in many papers |
# | ... in a layer with a window of n tokens | w (2 - w / s) instead of s, w = n + 1 | only scores in the window count |
#
# | feature | parameters of a layer | saved activations |
# |---|---|---|
# | g groups of a query heads | 2 h (a + g) d in attention | (2 a + 2 g) d elements per token |
# | value heads of d_v elements | h (a + g) (d + d_v) in attention | see ``_core_saved_numel`` |
# | rotary positions | none | (a + g) d more elements per token |
# | norms of queries and keys | 2 d per head, (a + g) d over all heads, or none | (a + g) d more elements per token |
# | sinks | a | none |
# | output gates | h a d | 2 a d more elements per token: the sigmoid and the product |
# | layers without rotary positions | none | those of rotary positions less |
# | norms before, after, both | 2, 2, 4 norms | the input of each norm |
# | parallel attention and feed-forward | 1 norm less if they share it | h fewer elements per token, 2 h if shared |
# | xIELU | 2 | none |
# | ALiBi | none | biases of w a / t s^2 bytes per stage, with w bytes per element |
# | ALiBi within documents | none | biases of w b a / t s^2 bytes per micro-batch |
# | a window without ALiBi | none | a mask of s^2 bytes per stage |
# | multi-latent attention | ``megatron.costs.latent_cost`` | ``megatron.costs.latent_cost`` |
# | recurrent mixers | ``megatron.costs.recurrent_cost`` | ``megatron.costs.recurrent_cost`` |
# | layers without a mixer or a feed-forward half | those of the other half | those of the other half |
#
# | D multi-token prediction layers | a layer, 2 h h, 3 norms each | 5 h more elements per token; D more logits |
#
# The D losses of multi-token prediction each apply the head once more, in forward and backward.
#
# FLOPs of rotary embedding and of soft-capping are not counted.
#
# Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", section 5.1.


@dataclass(frozen=True)
class DecoderCosts(Costs):
    """Decoder costs for samples with ``seq_length`` tokens.

    Args:
        is_causal: a token attends only to itself and preceding tokens.
        is_fused: attention is a fused kernel, which saves no scores or probabilities and skips masked scores.
        has_loss_kernels: Triton kernels compute the cross-entropy, which saves no softmax (``loss_costs``).
        is_blocked: attention in fp32 and fp64 is computed block by block, as on a CPU.
        mask_bytes: bytes per element in the hidden dropout masks; 0: no dropout.
        has_segments: attention does not cross document boundaries.
        uses_document_starts: attention uses document start positions instead of a mask in memory.
        context: context-parallel size: ranks over which sequences are split.
        head_ranks: number of context ranks over which attention distributes heads (all-to-all), for each layer or for
            all; keys and values are gathered over the other context ranks.
        expert: ranks over which a layer's experts are distributed.
        expert_tensor: tensor ranks over which each expert is sharded; 0: all.
        fp8_recipe: scales of products in FP8; "": no products in FP8.
        num_layers_at_start_in_bf16, num_layers_at_end_in_bf16: layers whose products are not in FP8.
    """

    is_causal: ClassVar[bool] = True
    model: Features
    seq_length: int
    is_fused: bool = field(default=True, kw_only=True)
    is_on_cpu: bool = field(default=False, kw_only=True, compare=False)
    has_loss_kernels: bool = field(default=False, kw_only=True, compare=False)
    is_blocked: bool = field(default=False, kw_only=True)
    mask_bytes: int = field(default=1, kw_only=True)
    has_segments: bool = field(default=False, kw_only=True)
    uses_document_starts: bool = field(default=False, kw_only=True)
    context: int = field(default=1, kw_only=True)
    head_ranks: tuple[int, ...] = field(default=(1,), kw_only=True)
    expert: int = field(default=1, kw_only=True)
    expert_tensor: int = field(default=0, kw_only=True)
    fp8_recipe: str = field(default="", kw_only=True)
    num_layers_at_start_in_bf16: int = field(default=0, kw_only=True)
    num_layers_at_end_in_bf16: int = field(default=0, kw_only=True)

    @property
    def num_parameters(self) -> int:
        return (
            self.stage_parameters([0, self.num_units])[0]
            if self.expert == 1
            else self.with_expert_ranks(1).num_parameters
        )

    @property
    def num_active_parameters(self) -> int:
        full = self.with_expert_ranks(1)
        layer_parameters, active = (
            sum(full.layer_parameters(layer=layer, is_active=is_active) for layer in self.layers_with_mtp)
            for is_active in (False, True)
        )
        return full.num_parameters - layer_parameters + active

    @property
    def expert_ranks(self) -> int:
        return self.expert

    def expert_copies(self, replicas: int, tensor: int = 1) -> int:
        return self.experts.num_copies(replicas, tensor) if self.model.num_experts else replicas

    def with_expert_ranks(self, ranks: int) -> DecoderCosts:
        return self if ranks == self.expert else replace(self, expert=ranks)

    def is_fp8_layer(self, layer: int) -> bool:
        """Return True if the products of a layer are in FP8."""
        num_fp8_layers = self.model.num_layers - self.num_layers_at_end_in_bf16
        return bool(self.fp8_recipe) and self.num_layers_at_start_in_bf16 <= layer < num_fp8_layers

    @property
    def fp8_share(self) -> float:
        """See ``Costs``. Products of blocks are emulated in other formats, so their share is 0."""
        if self.fp8_recipe != ROWWISE:
            return 0.0
        works = replace(self, context=1, expert=1).unit_work(1, 1, BYTES["bf16"])
        return 2 * sum(flops_of(work.fp8_products) for work in works) / self.flops_per_sample

    def fp8_scratch_bytes(self, samples: int, tensor: int) -> int:
        """See ``Costs``. On CUDA, kernels write the quantized rows only; an emulation has copies in wider formats."""
        if not self.fp8_recipe:
            return 0
        is_emulated = self.is_on_cpu or self.fp8_recipe != ROWWISE
        products = {product for work in self.unit_work(samples, tensor, 2) for product in work.fp8_products}
        numel = [
            product.rows * max(product.inner, product.columns) * product.count + product.weights for product in products
        ]
        return round(max(numel, default=0) * (EMULATED_FP8_BYTES if is_emulated else 1))

    def fp8_weight_bytes(self, tensor: int) -> list[int]:
        """See ``Costs``. Rows and transposed columns in 8 bits with their scales, or blocks dequantized to 16 bits.

        On a CPU, the emulation of blocks has fp32.
        """
        if self.fp8_recipe == ROWWISE:
            unit_bytes = [
                sum(2 * p.weights + 4 * (p.inner + p.columns) * p.count for p in work.fp8_products)
                for work in self.unit_work(1, tensor, BYTES["bf16"])
            ]
        else:
            width = BYTES["fp32" if self.is_on_cpu else "bf16"]
            unit_bytes = [
                sum(width * p.weights for p in work.fp8_products) for work in self.unit_work(1, tensor, BYTES["bf16"])
            ]
        return [round(num_bytes) for num_bytes in unit_bytes]

    def _fp8_savings(self) -> list[float]:
        """Return the cost per token that FP8 saves in each layer, in FLOPs of a forward pass; negative: it adds cost.

        Output and input gradient have the rate of FP8, weight gradients that of 16 bits. A third of the saved time in
        all three products counts, because backward costs twice as much as forward. Products of blocks are emulated and
        save nothing. CPUs emulate all products, but have the same costs, so that stages do not depend on the device.
        """
        if self.fp8_recipe != ROWWISE:
            return [0.0] * self.model.num_layers
        works = replace(self, context=1, expert=1).unit_work(1, 1, BYTES["bf16"])[1 : 1 + self.model.num_layers]
        savings = []
        for work in works:
            saved_flops = (2 - 2 / FP8_RATE_RATIO) * flops_of(work.fp8_products)
            quantized = sum(p.rows * (p.inner + p.columns) * p.count for p in work.fp8_products)
            savings.append((saved_flops - QUANTIZATION_FLOPS * quantized) / 3 / self.seq_length)
        return savings

    @property
    def layer_types(self) -> tuple[LayerType, ...]:
        """The type of each layer."""
        return layer_types(self.model)

    @property
    def with_experts(self) -> tuple[bool, ...]:
        """For each layer, True if it has experts."""
        return tuple(layer_type.feed_forward == EXPERTS for layer_type in self.layer_types)

    @property
    def has_attention(self) -> bool:
        """True if any layer has attention; also in a model without layers."""
        return has_attention(self.model)

    def recurrent(self, layer: int) -> RecurrentCosts | None:
        """Return the costs of the recurrent mixer of a layer, or None."""
        mixer = self.layer_types[layer].recurrent_mixer
        return COSTS[mixer](self.model) if mixer else None

    @property
    def layers_with_mtp(self) -> list[int]:
        """Indices of all layers, with the last index repeated for each multi-token prediction layer.

        A multi-token prediction layer contains a layer like the last one.
        """
        num_layers = self.model.num_layers
        return [*range(num_layers), *[num_layers - 1] * self.model.mtp_num_layers]

    @property
    def mtp_units(self) -> range:
        """Unit indices of the multi-token prediction layers, after their embedding's unit."""
        first = self.model.num_layers + 3
        return range(first, first + self.model.mtp_num_layers)

    def mtp_projection_parameters(self, tensor: int = 1) -> int:
        """Count a multi-token prediction layer's parameters outside of its inner layer: projection and 3 norms."""
        return 2 * self.model.hidden_size**2 // tensor + 3 * self.norm_parameters

    def _with_mtp(
        self, units: list[UnitValue], embedding: UnitValue, layer: Callable[[UnitValue], UnitValue]
    ) -> list[UnitValue]:
        """Insert the multi-token prediction units before the head in ``units``, a value per unit.

        Args:
            units: values for the embedding, the layers, the final norm and the head.
            embedding: value for the embedding of future tokens.
            layer: maps the last layer's value to a multi-token prediction layer's value.
        """
        depth = self.model.mtp_num_layers
        return [*units[:-1], embedding, *[layer(units[-3])] * depth, units[-1]] if depth else units

    @property
    def experts(self) -> ExpertCosts:
        """Cost of a feed-forward block with experts."""
        model = self.model
        return ExpertCosts(model, _num_matrices(model), _saved_per_width(model), self.expert, self.expert_tensor)

    @property
    def latent(self) -> LatentCosts | None:
        """Cost of a layer's multi-latent attention, or None."""
        return LatentCosts(self.model, self.num_norm_vectors) if self.model.multi_latent_attention else None

    @property
    def local_length(self) -> int:
        """Tokens per sample on one rank."""
        return self.seq_length // self.context

    @property
    def with_window(self) -> tuple[bool, ...]:
        """For each layer, True if it has a window."""
        model = self.model
        has_none = (False,) * model.num_layers
        return _window_pattern(model.window_attn_skip_freq, model.num_layers) if model.window_size else has_none

    def groups(self, layer: int) -> int:
        """Count the key and value heads in a layer."""
        model = self.model
        has_own_number = model.window_num_query_groups and self.with_window[layer]
        return model.window_num_query_groups if has_own_number else model.num_query_groups

    def keys(self, layer: int) -> int:
        """Return the total size of all key heads in a layer."""
        return self.groups(layer) * self.model.kv_hidden_size

    def keys_and_values(self, layer: int) -> int:
        """Return the total size of all key and value heads in a layer."""
        return self.groups(layer) * (self.model.kv_hidden_size + self.model.value_size)

    def has_sinks(self, layer: int) -> bool:
        """Check if the layer has attention sinks."""
        return has_sinks(self.model, has_window=bool(self.model.num_layers) and self.with_window[layer])

    @property
    def gates(self) -> int:
        """Total output gate size in a layer."""
        return attention_width(self.model) if self.model.attention_output_gate else 0

    def attention_saved_numel(self, layer: int = 0) -> int:
        """Count the elements per token that attention saves: queries, keys, values and its output.

        Rotary embedding saves another copy of queries and keys (except with context parallelism), as do query
        and key norms. With an all-to-all over all context ranks, another copy of the output is saved; the hierarchical
        form recomputes it. An output gate saves its sigmoid and the gated output.
        """
        copies = (attention_width(self.model) + self.keys(layer)) * (self.model.qk_norm != "none")
        if self.context > 1:
            copies += context_width(self.model) if self.head_ranks_of(layer) == self.context else 0
        elif has_rotary(self.model, layer):
            copies += attention_width(self.model) + self.keys(layer)
        return self._core_saved_numel(layer) + copies + 2 * self.gates

    def _core_saved_numel(self, layer: int) -> int:
        """Count the elements per token in queries, keys, values and context.

        Kernels that need equal head sizes save all four padded to ``padded_head_size``. If this pads the context, the
        unpadded context is saved in addition.
        """
        model = self.model
        context, heads, groups = context_width(model), model.num_attention_heads, self.groups(layer)
        has_tiles = self.is_on_cpu and self.context == 1 and (self.uses_document_starts or self.has_sinks(layer))
        if model.value_size == model.kv_hidden_size or has_tiles:
            return attention_width(model) + self.keys_and_values(layer) + context
        padded = 2 * (heads + groups) * model.padded_head_size
        return padded + (context if model.value_size < model.padded_head_size else 0)

    @property
    def num_norm_vectors(self) -> int:
        """Number of vectors in a norm: a scale, and possibly a bias."""
        return 2 if self.model.normalization == "LayerNorm" and self.model.norm_bias else 1

    @property
    def norm_parameters(self) -> int:
        """Number of parameters in one norm."""
        return self.num_norm_vectors * self.model.hidden_size

    def num_norms(self, layer: int) -> int:
        """Return the number of norms of a layer, excluding norms within its mixer."""
        layer_type = self.layer_types[layer]
        num_shared = self.model.parallel_residual == SHARED_NORM
        norms_per_half = 2 if norm_placement_of(self.model, layer_type) == "both" else 1
        return norms_per_half * layer_type.num_halves - num_shared

    @property
    def visible_keys_by_layer(self) -> list[float]:
        """Average number of keys that a query of each layer attends to in the layer's window; 0 without attention."""
        model = self.model
        windows = [model.window_size if has_window else 0 for has_window in self.with_window]
        return [
            mean_visible_keys(self.seq_length, window) if layer_type.has_attention else 0.0
            for window, layer_type in zip(windows, self.layer_types, strict=True)
        ]

    @property
    def unit_names(self) -> list[str]:
        layers = [f"layer {idx}" for idx in range(self.model.num_layers)]
        depth = self.model.mtp_num_layers
        mtp_names = ["MTP embedding", *[f"MTP layer {idx}" for idx in range(depth)]] if depth else []
        return ["embedding", *layers, "final norm", *mtp_names, "head"]

    @property
    def unit_costs(self) -> list[float]:
        model, h = self.model, self.model.hidden_size
        layers = [
            flops_of(self._mixer_products(idx, 1, 1, 1))
            + self._feed_forward_flops(idx)
            + 2 * keys * self._score_width
            + self._state_cost(idx)
            - saved
            for idx, (keys, saved) in enumerate(zip(self.visible_keys_by_layer, self._fp8_savings(), strict=True))
        ]
        layer = max(layers, default=projections_flops(model) + feed_forward_flops(model))
        norm, head = ELEMENTWISE * h / layer, head_cost(model) * self.num_heads / layer
        units = [norm, *[layer_flops / layer for layer_flops in layers], norm, head]
        return self._with_mtp(units, 0.0, lambda cost: cost + 4 * h * h / layer + 4 * norm)

    @property
    def num_heads(self) -> int:
        """Number of times that the head is applied: for the loss, and for each multi-token prediction loss."""
        return 1 + self.model.mtp_num_layers

    @property
    def flops_per_sample(self) -> float:
        return self.seq_length * self.flops_per_token()

    def flops_per_token(self, *, causal: bool = True) -> float:
        """Count forward and backward FLOPs per token; ``causal``: count only the causal half of the scores."""
        model = self.model
        head = known_vocab_size(model) * model.hidden_size * self.num_heads
        layers = sum(self.layer_parameters(layer=layer, is_active=True) for layer in self.layers_with_mtp)
        products = layers + model.mtp_num_layers * self.mtp_projection_parameters() + self.norm_parameters + head
        keys = self.visible_keys_by_layer
        scores = self._score_width * sum(keys[layer] for layer in self.layers_with_mtp)
        mixers = [self.recurrent(layer) for layer in self.layers_with_mtp]
        states = sum(mixer.state_flops for mixer in mixers if mixer is not None)
        return 6.0 * products + (6.0 if causal else 12.0) * scores + 3.0 * states

    @property
    def _score_width(self) -> int:
        """Total size of all query and all value heads."""
        return attention_width(self.model) + context_width(self.model)

    def _attention_products(self, layer: int, tokens: int, key_tokens: int, tensor: int) -> tuple[Product, ...]:
        """List a layer's attention projections; arguments as for ``LatentCosts.products``."""
        if self.latent:
            return self.latent.products(tokens, key_tokens, tensor)
        return attention_products(self.model, tokens, tensor, self.keys_and_values(layer), self.gates)

    def _mixer_products(self, layer: int, tokens: int, key_tokens: int, tensor: int) -> tuple[Product, ...]:
        """Return the projections of a layer's mixer; arguments as of ``LatentCosts.products``."""
        mixer = self.recurrent(layer)
        recurrent = () if mixer is None else mixer.products(tokens, tensor)
        if not self.layer_types[layer].has_attention:
            return recurrent
        return (*self._attention_products(layer, tokens, key_tokens, tensor), *recurrent)

    def _state_cost(self, layer: int) -> float:
        """Return the cost per token of the recurrence of a layer in chunks, in FLOPs of a matrix product."""
        mixer = self.recurrent(layer)
        return 0.0 if mixer is None else flops_of(mixer.core_products(1, 1))

    def layer_parameters(self, tensor: int = 1, layer: int = 0, *, is_active: bool = False) -> int:
        """Count a layer's parameters on one of ``tensor`` ranks; norms and output biases are replicated.

        Args:
            is_active: count only the experts that a token uses.
        """
        layer_type, mixer = self.layer_types[layer], self.recurrent(layer)
        parameters = self.num_norms(layer) * self.norm_parameters
        if layer_type.has_attention:
            parameters += self._attention_parameters(tensor, layer)
        if mixer is not None:
            parameters += mixer.parameters(tensor)
        if layer_type.feed_forward == EXPERTS:
            return parameters + self.experts.parameters(tensor, is_active=is_active)
        return parameters + (feed_forward_parameters(self.model, tensor) if layer_type.feed_forward == MLP else 0)

    def _attention_parameters(self, tensor: int, layer: int) -> int:
        """Return the number of parameters of a layer's attention, including norms of queries and keys."""
        if self.latent:
            return self.latent.parameters(tensor)
        parameters = attention_parameters(
            self.model, tensor, self.keys_and_values(layer), self.model.add_qkv_bias, self.gates
        )
        has_weight = self.model.softmax_type == LEARNABLE and self.has_sinks(layer)
        parameters += self.model.num_attention_heads // tensor if has_weight else 0
        return parameters + self._head_norm_parameters(tensor, layer)

    def _feed_forward_flops(self, layer: int) -> int:
        flops = {EXPERTS: self.experts.flops, MLP: feed_forward_flops(self.model), NO_MLP: 0}
        return flops[self.layer_types[layer].feed_forward]

    def _head_norm_parameters(self, tensor: int, layer: int) -> int:
        """Count the query and key norm parameters; a weight that all heads share is not sharded."""
        norm_type, d = self.model.qk_norm, self.model.kv_hidden_size
        all_heads = (attention_width(self.model) + self.keys(layer)) // tensor
        if norm_type == "per-head":  # without a bias
            return all_heads
        return self.num_norm_vectors * {"none": 0, "l2": 0, "head": 2 * d, "all": all_heads}[norm_type]

    @memoized_list
    def unit_parameters(self, tensor: int = 1) -> list[int]:
        model = self.model
        head = table_parameters(model, tensor) if model.untie_embeddings else 0
        table = 0 if model.mtp_num_layers else head  # the last stage has a copy, see ``shared_parameters``
        positions = model.max_position_embeddings * model.hidden_size if model.has_learned_positions else 0
        norm = self.norm_parameters if model.embed_layernorm else 0
        types = list(zip(self.layer_types, self.with_window, strict=True))
        idx_by_type = {layer_type: idx for idx, layer_type in enumerate(types)}
        parameters = {layer_type: self.layer_parameters(tensor, idx) for layer_type, idx in idx_by_type.items()}
        layers = [parameters[layer_type] for layer_type in types]
        units = [table + positions + norm, *layers, self.norm_parameters, head]
        return self._with_mtp(units, 0, lambda parameters: parameters + self.mtp_projection_parameters(tensor))

    def distributed_parameters(self, tensor: int = 1) -> list[int]:
        parameters = self.experts.distributed_parameters(tensor) if self.model.num_experts else 0
        units = [0, *[parameters * has_experts for has_experts in self.with_experts], 0, 0]
        return self._with_mtp(units, 0, lambda distributed: distributed)

    owns_shared = True  # the first stage's embedding contains the table

    @property
    def loss_units(self) -> Sequence[int]:
        return self.mtp_units if self.model.mtp_num_layers else ()

    def shared_parameters(self, tensor: int = 1) -> list[Shared]:
        has_mtp = self.model.mtp_num_layers > 0
        if self.model.untie_embeddings and not has_mtp:
            return []
        users = (0, self.model.num_layers + 2 if has_mtp else self.num_units - 1)
        lookups = users if self.model.untie_embeddings else users[:1]
        return [Shared(table_parameters(self.model, tensor), users, lookups)]

    @memoized_list
    def unit_saved_bytes(
        self, samples: int, tensor: int, width: int, sequence: int = 1, *, saves_gathered_inputs: bool = False
    ) -> list[SavedBytes]:
        """See ``Costs``. In 16 bits, a layer saves 34 h bytes per token if f = 4 h, a d = h and t = 1.

        Sequence parallelism does not shard the input of the head.
        """
        model, h = self.model, self.model.hidden_size
        tokens = samples * self.local_length
        feed_forward = {NO_MLP: 0, MLP: tokens * feed_forward_saved_numel(model) * width // tensor}
        if model.num_experts:
            feed_forward[EXPERTS] = self.experts.saved_bytes(
                tokens, tensor, width, sequence, saves_gathered_inputs=saves_gathered_inputs
            )
        layers = []
        for layer, layer_type in enumerate(self.layer_types):
            halves = layer_type.num_halves
            bytes_between = between_bytes(
                halves * h * width, halves * h * self.mask_bytes, sequence, saves_gathered_inputs=saves_gathered_inputs
            )
            # parallel mixer and feed-forward half have the same input
            num_extra_inputs = self.num_norms(layer) - halves - (model.parallel_residual != SEQUENTIAL)
            bytes_between += num_extra_inputs * h * width // sequence
            mixer_bytes, core = self._mixer_saved_bytes(layer, samples, tensor, width, sequence)
            full = tokens * bytes_between + mixer_bytes + feed_forward[layer_type.feed_forward]
            layers.append(SavedBytes(full, tokens * h * width // sequence, core))
        hidden = tokens * h * width
        embedding = SavedBytes(tokens * h * (self.mask_bytes + (width if model.embed_layernorm else 0)) // sequence)
        # The norms and the projection of an MTP layer save their inputs: embedding, hidden states, both, and output.
        mtp_bytes = 5 * hidden // sequence + tokens * h * self.mask_bytes // sequence
        units = [embedding, *layers, SavedBytes(hidden // sequence), SavedBytes(hidden * self.num_heads)]
        return self._with_mtp(units, SavedBytes(), lambda layer: replace(layer, full=layer.full + mtp_bytes))

    def _mixer_saved_bytes(self, layer: int, samples: int, tensor: int, width: int, sequence: int) -> tuple[int, int]:
        """Return the bytes that the mixer of ``layer`` saves: (in total, by its core)."""
        tokens, mixer, total, core = samples * self.local_length, self.recurrent(layer), 0, 0
        if self.layer_types[layer].has_attention:
            core = self._core_saved_bytes(samples, tensor, width)
            total = tokens * self._attention_saved_bytes(layer, tensor, width, sequence) + core
        if mixer is not None:
            recurrent_bytes, recurrent_core = mixer.saved_bytes(tokens, tensor, width)
            total, core = total + recurrent_bytes, core + recurrent_core
        return total, core

    def _attention_saved_bytes(self, layer: int, tensor: int, width: int, sequence: int) -> int:
        """Compute the bytes per token that attention in ``layer`` saves on one of ``tensor`` ranks."""
        if self.latent:
            rebuilds_keys = self.context > self.head_ranks_of(layer)
            return round(width * self.latent.saved_numel(tensor, sequence, self.context, rebuilds_keys=rebuilds_keys))
        return self.attention_saved_numel(layer) * width // tensor

    def attention_scratch_bytes(
        self, samples: int, tensor: int, width: int, sequence: int = 1, *, saves_gathered_inputs: bool = False
    ) -> int:
        """See ``Costs``. Counts the scratch memory of one thread and the gradients that a mixer's backward holds.

        The gradients belong to the queries, keys, values, context and layer output.

        The result is the maximum of attention, experts and recurrent mixers. Before the backward of a layer's mixer
        runs, the layer's feed-forward half has freed its memory. The number of freed bytes is computed for the last
        layer, which may have experts, or no feed-forward half.
        """
        tokens = samples * self.local_length
        last_half = self.layer_types[-1].feed_forward if self.layer_types else MLP
        feed_forward = tokens * (feed_forward_saved_numel(self.model) * width // tensor) if last_half == MLP else 0
        if last_half == EXPERTS:
            feed_forward = self.experts.saved_bytes(
                tokens, tensor, width, sequence, saves_gathered_inputs=saves_gathered_inputs
            )
        scratch = 0
        if self.has_attention:
            scratch = self._attention_scratch_bytes(
                samples, tensor, width, sequence, feed_forward, saves_gathered_inputs=saves_gathered_inputs
            )
        if self.model.num_experts:
            scratch = max(scratch, self.experts.scratch_bytes(tokens, tensor, width, sequence))
        for mixer in dict.fromkeys(layer_type.recurrent_mixer for layer_type in self.layer_types):
            if mixer:
                recurrent_bytes = COSTS[mixer](self.model).scratch_bytes(tokens, tensor, width)
                scratch = max(scratch, recurrent_bytes - feed_forward)
        return scratch

    def _attention_scratch_bytes(
        self,
        samples: int,
        tensor: int,
        width: int,
        sequence: int,
        feed_forward_bytes: int,
        *,
        saves_gathered_inputs: bool,
    ) -> int:
        """Compute attention's scratch bytes in backward, minus the memory that its layer has freed before.

        Args:
            feed_forward_bytes: bytes that the backward of the feed-forward block has freed.
        """
        if self.context > 1:
            fewest = min(map(self.head_ranks_of, range(self.model.num_layers)), default=1)
            heads = max(self.model.num_query_groups, self.model.window_num_query_groups)
            numel = self.latent.rebuilt_numel(tensor) if self.latent else self._message_numel(heads, tensor)
            gathered = samples * self.seq_length * numel // fewest * width if fewest < self.context else 0
            return max(GATHERED_COPIES * gathered - feed_forward_bytes, 0)
        if not self.is_blocked or width < 4:
            return 0
        model, h = self.model, self.model.hidden_size
        heads = samples * model.num_attention_heads // tensor
        scratch = memory.backward_bytes(heads, self.seq_length, model.kv_hidden_size, width)
        gradients = (h // sequence + 4 * attention_width(model) // tensor) * width
        freed = between_bytes(h * width, h * self.mask_bytes, sequence, saves_gathered_inputs=saves_gathered_inputs)
        return max(scratch + samples * self.seq_length * (gradients - freed) - feed_forward_bytes, 0)

    @property
    def saves_context_messages(self) -> bool:
        return self.latent is not None

    def context_messages(self, samples: int, tensor: int, width: int, unit: int = 1) -> tuple[int, ...]:
        """See ``Costs``. One all-gather of keys and values, or of latents.

        All heads are padded to one size. If layers have different numbers of key heads, the largest number counts.
        """
        layer = self._layer_of(unit)
        if self.context == 1 or (layer is not None and not self.layer_types[layer].has_attention):
            return ()
        if self.latent:
            return (samples * self.seq_length * self.latent.latent_size * width,)
        ranks = self.head_ranks_of(layer or 0)
        heads = max(self.model.num_query_groups, self.model.window_num_query_groups)
        numel = self._message_numel(heads, tensor)
        return (samples * self.seq_length * numel // ranks * width,) if ranks < self.context else ()

    def head_messages(self, samples: int, tensor: int, width: int, unit: int = 1) -> tuple[int, ...]:
        """See ``Costs``. The all-to-alls of queries, keys, values and context; latents are not exchanged."""
        layer = self._layer_of(unit)
        if self.context_head_ranks(unit) == 1 or (layer is not None and not self.layer_types[layer].has_attention):
            return ()
        heads = max(self.model.num_query_groups, self.model.window_num_query_groups) + self.model.num_attention_heads
        numel = self.latent.exchanged_numel(tensor) if self.latent else self._message_numel(heads, tensor)
        return (samples * self.seq_length * numel * width,)

    def _message_numel(self, num_heads: int, tensor: int) -> int:
        """Count the elements per token of two vectors for each of ``num_heads`` heads, on a tensor rank."""
        return 2 * num_heads * self.model.padded_head_size // tensor

    def head_ranks_of(self, layer: int) -> int:
        """Return the number of context ranks over which the attention of ``layer`` distributes its heads."""
        return self.head_ranks[min(layer, len(self.head_ranks) - 1)]

    def context_head_ranks(self, unit: int = 1) -> int:
        return self.head_ranks_of(self._layer_of(unit) or 0)

    @property
    def gathers_over_all_context_ranks(self) -> bool:
        return self.latent is not None

    def state_messages(self, samples: int, tensor: int, width: int, unit: int) -> tuple[int, ...]:
        """See ``Costs``. Each rank has two chunks, whose states and last convolution inputs all ranks gather."""
        layer = self._layer_of(unit)
        mixer = None if layer is None else self.recurrent(layer)
        if mixer is None or self.context == 1:
            return ()
        states, inputs = mixer.message_numel(tensor)
        chunks = 2 * self.context * samples
        return chunks * inputs * width, chunks * states * max(width, 4)

    def _layer_of(self, unit: int) -> int | None:
        """Return the index of the layer of a unit; None for units without a layer or without layers in the model."""
        if 1 <= unit <= self.model.num_layers:
            return unit - 1
        return self.model.num_layers - 1 if unit in self.mtp_units else None

    def expert_messages(self, samples: int, tensor: int, width: int) -> list[tuple[int, ...]]:
        if self.expert == 1:
            return [()] * self.num_units
        layer_messages: tuple[int, ...] = self.experts.messages(samples * self.local_length, tensor, width)
        layers = [layer_messages if has_experts else () for has_experts in self.with_experts]
        return self._with_mtp([(), *layers, (), ()], (), lambda messages: messages)

    @memoized_list
    def unit_work(self, samples: int, tensor: int, width: int) -> list[Work]:
        model, h = self.model, self.model.hidden_size
        tokens = samples * self.local_length
        vocabulary = -(-known_vocab_size(model) // tensor)
        hidden, scalars = tokens * h * width, 4 * tokens
        # bytes of the gradient that attention all-reduces
        entering = tokens * self.latent.entering_size * width if self.latent else hidden
        layers = []
        for idx, layer_type in enumerate(self.layer_types):
            has_experts, recurrent = layer_type.feed_forward == EXPERTS, self.recurrent(idx)
            core = self._scores(samples, tensor) if layer_type.has_attention else ()
            core += () if recurrent is None else recurrent.core_products(tokens, tensor)
            feed_forward: tuple[Product, ...] = ()
            if layer_type.feed_forward != NO_MLP:
                experts = self.experts
                feed_forward = (
                    experts.products(tokens, tensor) if has_experts else feed_forward_products(model, tokens, tensor)
                )
            feed_forward_bytes: tuple[int, ...] = (hidden,) * (layer_type.feed_forward == MLP)
            if has_experts:
                feed_forward_bytes = self.experts.reduced_bytes(hidden, tensor)
            mixers = (entering,) * layer_type.has_attention + (hidden,) * (recurrent is not None)
            operations = OPERATIONS["experts"] if has_experts else 0
            operations += OPERATIONS["recurrent"] if recurrent is not None else 0
            operations += OPERATIONS["layer"] if layer_type.has_attention else OPERATIONS["layer"] // 2
            layers.append(
                Work(
                    products=(*self._mixer_products(idx, tokens, samples * self.seq_length, tensor), *feed_forward),
                    core=core,
                    operations=operations,
                    reduced_bytes=(*(hidden,) * len(mixers), *feed_forward_bytes),
                    backward_reduced_bytes=(*mixers, *feed_forward_bytes),
                    fp8_recipe=self.fp8_recipe if self.is_fp8_layer(idx) else "",
                    maxima_bytes=4 * (tokens + h) if self.fp8_recipe == ROWWISE and self.is_fp8_layer(idx) else 0,
                )
            )
        num_heads = self.num_heads
        units = [
            Work(operations=OPERATIONS["embedding"], reduced_bytes=(hidden,)),
            *layers,
            Work(operations=OPERATIONS["norm"]),
            Work(
                products=(Product(tokens, h, vocabulary),) * num_heads,
                operations=OPERATIONS["head"] * num_heads,
                reduced_bytes=(scalars,) * 3 * num_heads,  # all-reduces of maximum, label logit, sum of exponentials
                backward_reduced_bytes=(hidden,) * num_heads,
            ),
        ]

        def add_projection(layer: Work) -> Work:
            return replace(
                layer,
                products=(*layer.products, Product(tokens, 2 * h, h // tensor, is_column=True)),
                operations=layer.operations + OPERATIONS["embedding"] + 4 * OPERATIONS["norm"],
                reduced_bytes=(*layer.reduced_bytes, hidden, hidden),  # embeddings, outputs of the projection
                backward_reduced_bytes=(*layer.backward_reduced_bytes, 2 * hidden),
            )

        return self._with_mtp(units, Work(), add_projection)

    def _scores(self, samples: int, tensor: int) -> tuple[Product, ...]:
        """List the attention products for all heads on a rank; a fused kernel computes only the causal half."""
        num_heads = samples * self.model.num_attention_heads / tensor
        causal_factor = 0.5 if self.is_causal and self.is_fused else 1.0
        head_sizes = self.model.kv_hidden_size, self.model.value_size
        return scores(self.local_length, self.seq_length, *head_sizes, num_heads * causal_factor)

    def _core_saved_bytes(self, samples: int, tensor: int, width: int) -> int:
        """Compute the bytes saved for probabilities before and after dropout, and for the dropout mask.

        In 16 bits these are 5 a s / h times s b h bytes. Fused attention saves none of them; in fp32 on a CPU it saves
        two values per query.
        """
        queries = samples * self.model.num_attention_heads // tensor * self.local_length
        if self.is_fused:
            return 2 * width * queries if self.is_blocked and width == 4 else 0
        return queries * self.seq_length * (2 * width + 1)

    def shared_saved_bytes(self, samples: int, tensor: int, width: int) -> list[Shared]:
        if not self.has_segments or self.uses_document_starts or self.model.position_embedding_type != ALIBI:
            return []
        layers = [unit for unit, layer_type in enumerate(self.layer_types, 1) if layer_type.has_attention]
        return [Shared(samples * self._mask_bytes(tensor, width), (*layers, *self.mtp_units))]

    def memory_per_stage(self, bounds: Sequence[int], **options: Any) -> list[Memory]:
        """See ``Costs``. Includes the mask that all micro-batches of a stage share."""
        mask = self._mask_bytes(options.get("tensor", 1), BYTES[options.get("dtype", "fp32")])
        memories = super().memory_per_stage(bounds, **options)
        return [replace(memory, activations=memory.activations + mask) for memory in memories] if mask else memories

    def _mask_bytes(self, tensor: int, width: int) -> int:
        """Return the bytes of the ALiBi biases or of the window's mask."""
        if self.uses_document_starts or not self.has_attention:
            return 0
        num_scores = self.local_length * self.seq_length
        if self.model.position_embedding_type == ALIBI:
            return width * self.model.num_attention_heads // tensor * num_scores
        return num_scores if 0 < self.model.window_size < self.seq_length - 1 else 0

    def logit_bytes(self, samples: int, tensor: int, width: int) -> int:
        num_tokens = samples * self.local_length * self.num_heads
        return num_tokens * -(-known_vocab_size(self.model) // tensor) * (width + 4)

    def loss_bytes(self, samples: int, tensor: int, width: int, *, forwards: int = 1) -> int:
        tokens = samples * self.local_length
        has_cap = self.model.final_logit_softcapping > 0
        # one of the losses is computed at a time; all of them save their logits or gradients for backward
        return loss_bytes(
            self.model, tokens, tensor, width, forwards=forwards * self.num_heads,
            is_on_cpu=self.is_on_cpu, has_cap=has_cap, has_kernels=self.has_loss_kernels,
        )  # fmt: skip

    def stage_bounds(self, stages: int, chunks: int = 1, placement: str = LOOP) -> list[int]:
        """See ``Costs``. With several chunks, ``tds.partition.partition_uniform_chunks`` distributes the layers."""
        costs, num_layers = self.unit_costs, self.model.num_layers
        if stages == 1:
            return [0, len(costs)]
        first, last = costs[0], sum(costs[num_layers + 1 :])
        if chunks > 1:
            counts = partition_uniform_chunks(num_layers, stages, chunks, first, last, placement)
            return [0, *[1 + bound for bound in accumulate(counts[:-1])], len(costs)]
        layers = costs[1 : num_layers + 1]
        layers[:1] = [cost + first for cost in layers[:1]]
        layers[-1:] = [cost + last for cost in layers[-1:]]
        inner = partition_balanced(layers, stages)[1:-1]
        return [0, *[bound + 1 for bound in inner], len(costs)]


def dropout_costs(config: Any, is_on_cpu: bool) -> dict[str, Any]:
    """Choose the arguments to ``DecoderCosts`` that depend on dropout.

    Attention with dropout saves its probabilities on a CPU or with --layout-independent-dropout. Attention with sinks
    saves them if no kernel supports it. On a CPU, dropout masks are saved as factors in the training dtype.
    """
    model, dtype = config.model, config.precision.dtype or "fp32"
    is_saved = bool(model.attention_dropout and (is_on_cpu or model.layout_independent_dropout))
    if model.softmax_type != VANILLA:
        is_saved = is_saved or mask_reason(config, "cpu" if is_on_cpu else "cuda") is not None
    return {
        "is_fused": not is_saved,
        "mask_bytes": 0 if not model.hidden_dropout else BYTES.get(dtype, 4) if is_on_cpu else 1,
    }


def loss_costs(config: Any, is_on_cpu: bool) -> dict[str, Any]:
    """Choose the arguments to ``DecoderCosts`` that determine the loss memory.

    The planner cannot check if Triton is installed, and assumes it, because torch's CUDA builds include Triton. Without
    Triton, the loss needs the memory that is estimated with ``--fused-kernels torch``.
    """
    parallel = config.parallel
    is_on_cuda = not is_on_cpu and parallel.device in ("auto", "cuda")
    return {"is_on_cpu": is_on_cpu, "has_loss_kernels": is_on_cuda and parallel.fused_kernels != "torch"}


MIN_VARLEN_LENGTH = 512
"""Longer sequences may use the variable-length kernel; must equal ``2 * megatron.ops.document_attention.SHORT``."""
FLEX_HEAD_SIZES = (16, 256)
"""Must equal ``MIN_HEAD_SIZE`` and ``MAX_HEAD_SIZE`` of ``megatron.ops.flex_attention``."""


def mask_reason(config: Any, device_type: str, *, is_causal: bool = True) -> str | None:
    """Explain why attention within documents needs a mask on this device type; None if it needs no mask.

    CUDA devices are assumed to support Triton, and FlashAttention in 16 bits.
    """
    model, dtype = config.model, config.precision.dtype or "fp32"
    if model.attention_dropout:
        return f"--attention-dropout {model.attention_dropout:g} requires a mask; --attention-dropout 0 does not"
    if device_type == "cpu":
        return None
    if device_type != "cuda":
        return f"{device_type} has no variable-length attention"
    has_more = not is_causal or model.position_embedding_type == ALIBI or model.attn_logit_softcapping > 0
    has_more = has_more or model.softmax_type != VANILLA
    is_long = config.batch.seq_length > MIN_VARLEN_LENGTH
    if is_long and not has_more and dtype in ("bf16", "fp16") and model.padded_head_size % 8 == 0:
        return None
    if dtype == "fp64":
        return "CUDA kernels only support fp32 and 16-bit formats"
    smallest, largest = FLEX_HEAD_SIZES
    if not smallest <= model.padded_head_size <= largest:
        return f"flex_attention supports head sizes from {smallest} to {largest}, got {model.padded_head_size}"
    return None


def distribution_costs(config: Any) -> dict[str, Any]:
    """Choose the arguments to ``DecoderCosts`` that describe how sequences and experts are distributed over ranks."""
    parallel = config.parallel
    expert = parallel.expert_model_parallel_size if config.model.num_experts else 1
    return {
        "context": parallel.context_parallel_size,
        "head_ranks": tuple(map(parallel.head_ranks_of, parallel.cp_comm_type.split())),
        "expert": expert,
        "expert_tensor": parallel.expert_tensor_parallel_size,
    }


def costs(config: Any, is_on_cpu: bool = False) -> Costs:
    """Build the decoder costs for ``config``; saved activations depend on the device type."""
    model, has_segments = config.model, config.data.separates_documents
    is_plain = model.has_plain_attention and not model.attention_dropout
    distribution = distribution_costs(config)
    needs_starts = has_segments or distribution["context"] > 1 or model.softmax_type != VANILLA
    return DecoderCosts(
        model,
        config.batch.seq_length,
        is_blocked=is_on_cpu and is_plain and distribution["context"] == 1,
        has_segments=has_segments,
        uses_document_starts=needs_starts and mask_reason(config, "cpu" if is_on_cpu else "cuda") is None,
        **distribution,
        **config.precision.fp8_layers(),
        **dropout_costs(config, is_on_cpu),
        **loss_costs(config, is_on_cpu),
    )
