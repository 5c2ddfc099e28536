"""Mutants of the mechanisms of dense Hugging Face types: parallel residuals, xIELU, LongRoPE, temperatures, rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tds.param_info import info_of, set_info
from tests.mutants.mutant import call_after_init, mutant

FEATURE = "tests/models/common/test_features.py::test_feature_matches_formula"
LAYOUT = "tests/parity/test_dense.py::test_every_layout_equals_single_process"
MAPPING = "tests/models/common/test_weight_mapping.py"


@mutant("megatron.models.common.xielu:XIELU.__init__", f"{LAYOUT}[apertus-grid32---sequence-parallel]")
def gradients_of_xielu_are_not_summed_over_tensor_ranks(original: Any) -> Any:
    def drop_sum(self: Any) -> None:
        for parameter in self.parameters():
            set_info(parameter, replace(info_of(parameter), has_partial_grad=False))
            parameter.sequence_parallel = False

    return call_after_init(original, drop_sum)


@mutant("megatron.ops.xielu:_XIELU.backward", f"{FEATURE}[xielu]")
def negative_slope_of_xielu_lacks_the_linear_term(original: Any) -> Any:
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad_x, *others = original(ctx, *grads)
        return grad_x + 0.1 * grads[0] * (ctx.saved_tensors[0] <= 0), *others

    return backward


@mutant("megatron.models.common.transformer:TransformerLayer._add_parallel_mlp", f"{FEATURE}[parallel, two norms]")
def parallel_feed_forward_layer_reads_the_output_of_attention(original: Any) -> Any:
    return lambda self, x, normed, branch: original(self, x + branch, normed, 0 * branch)


@mutant("megatron.models.common.attention:scale_queries", f"{LAYOUT}[phi3-grid21-]")
def temperature_counts_positions_on_each_context_rank(original: Any) -> Any:
    return lambda query, positions, scale, floor: original(query, None, scale, floor)


@mutant("megatron.ops.positions:Rotary.frequencies", f"{FEATURE}[rope, longrope, long]")
def long_samples_use_the_short_factors(original: Any) -> Any:
    return lambda self: original(replace(self, is_long=False))


@mutant(
    "megatron.models.common.rotary_rows:RotaryRows.to_ours",
    f"{MAPPING}::test_conversion_orders_rows_by_group_and_is_reversible",
)
def adjacent_pairs_are_read_as_halves(original: Any) -> Any:
    return lambda self, rows: rows


@mutant(
    "megatron.models.common.rotary_rows:RotaryRows.enclosing",
    f"{MAPPING}::test_every_slice_equals_slice_of_converted_weight",
)
def slices_are_reordered_from_their_first_row(original: Any) -> Any:
    """The order of rows belongs to a head, which a slice may enter in the middle."""

    def enclosing(self: Any, rows: slice) -> slice:
        return slice(rows.start, rows.start + -(-(rows.stop - rows.start) // self.period) * self.period)

    return enclosing
