"""Mutants of layers with different mixers: their halves, document starts, caches and costs."""

from __future__ import annotations

from typing import Any

import torch

from megatron.models.common.cache_slots import KVCacheSlots
from tests.mutants.mutant import mutant

HYBRID = "tests/models/common/test_hybrid_layers.py"
FORMULA = f"{HYBRID}::test_hybrid_model_matches_formulas"
STARTS = f"{HYBRID}::test_recurrent_layers_get_starts_only_with_documents"
CACHE = f"{HYBRID}::test_cache_of_padded_rows_matches_full_forward[every second layer]"
CONVOLUTION = f"{HYBRID}::test_cache_of_convolution_has_last_inputs_of_each_row[4]"
TYPES = "tests/config/test_layer_types.py"


@mutant("megatron.models.common.masks:Masks.get_starts", f"{FORMULA}[all layers-True]")
def recurrent_mixers_get_no_document_starts(original: Any) -> Any:
    return lambda self, segment_ids: None


@mutant("megatron.models.common.masks:Masks._compute_full_starts", STARTS)
def document_starts_are_one_token_late(original: Any) -> Any:
    return lambda self, segment_ids: original(self, segment_ids) + 1


@mutant("megatron.models.common.transformer:TransformerLayer._mix", f"{FORMULA}[parallel heads-False]")
def parallel_heads_lack_the_recurrent_mixer(original: Any) -> Any:
    def mix(self: Any, normed: torch.Tensor, *args: Any) -> torch.Tensor:
        has_both = self.attention is not None and self.recurrent is not None
        return self.attention(normed, *args[:3]) if has_both else original(self, normed, *args)

    return mix


@mutant("megatron.config.layer_types:linear_layers", f"{TYPES}::test_frequency_selects_layers_as_in_megatron")
def frequency_counts_layers_from_0(original: Any) -> Any:
    def linear_layers(variant: str, frequency: str, num_layers: int) -> tuple[bool, ...]:
        layers = original(variant, frequency, num_layers)
        return (*layers[-1:], *layers[:-1]) if frequency.isdecimal() else layers

    return linear_layers


@mutant(
    "megatron.config.layer_types:LayerType.num_halves",
    f"{HYBRID}::test_layers_with_one_half_count_one_addition_to_the_residual_stream",
)
def every_layer_counts_two_additions_to_the_residual_stream(original: Any) -> Any:
    return property(lambda self: 2)


@mutant("megatron.models.common.recurrent_cache:RecurrentCache.is_padding", CACHE)
def padding_changes_the_cached_state(original: Any) -> Any:
    return lambda self, length: None


@mutant("megatron.models.common.cache_slots:KVCacheSlots.advance", CACHE)
def later_passes_keep_the_lengths_of_the_first(original: Any) -> Any:
    def advance(self: KVCacheSlots, positions: torch.Tensor, lengths: torch.Tensor | None = None) -> None:
        previous = self.lengths
        original(self, positions, lengths)
        self.lengths = previous if lengths is None and previous is not None else lengths

    return advance


@mutant("megatron.models.common.recurrent_cache:RecurrentCache.update_conv", CONVOLUTION)
def cached_convolution_inputs_end_with_padding(original: Any) -> Any:
    def update_conv(self: Any, x: torch.Tensor, kernel_size: int) -> torch.Tensor:
        lengths, self.slots.lengths = self.slots.lengths, None
        left: torch.Tensor = original(self, x, kernel_size)
        self.slots.lengths = lengths
        return left

    return update_conv


@mutant("megatron.models.common.recurrent_cache:RecurrentCache.keep", CACHE)
def dropped_rows_stay_in_the_recurrent_cache(original: Any) -> Any:
    return lambda self, rows: None


@mutant("megatron.config.recurrent:norm_placement_of", f"{FORMULA}[own norms-False]", raises=True)
def recurrent_layers_have_the_norms_of_attention(original: Any) -> Any:
    return lambda model, layer_type: model.norm_placement


@mutant(
    "megatron.models.common.initial_values:_fraction",
    f"{HYBRID}::test_initial_values_of_other_distributions_are_the_same_in_every_shard",
)
def initial_values_are_normal_instead_of_uniform(original: Any) -> Any:
    return lambda normal: 0.5 + 0.3 * normal.double()


@mutant(
    "megatron.costs.decoder_cost:DecoderCosts._state_cost",
    "tests/costs/test_recurrent_cost.py::test_cost_of_a_recurrent_layer_includes_its_chunks",
)
def partition_ignores_recurrences(original: Any) -> Any:
    return lambda self, layer: 0.0
