"""Mutants of products in FP8."""

from __future__ import annotations

from typing import Any

import torch

from megatron.mpu import fp8_quantize
from tests.mutants.mutant import mutant

TESTS = "tests/mpu/test_fp8.py"
FACTORS = f"{TESTS}::test_quantized_factors_are_those_of_one_process"
WEIGHTS, COSTS = "tests/mpu/test_fp8_weights.py", "tests/costs/test_fp8_cost.py"
NEAR = f"{TESTS}::test_linear_in_fp8_is_near_linear_in_fp64[True-rowwise]"


@mutant("megatron.mpu.fp8:_reduced", f"{FACTORS}[2-False]", f"{FACTORS}[4-True]")
def maximum_is_that_of_the_shard(original: Any) -> Any:
    return lambda maxima, group: maxima


@mutant("megatron.mpu.fp8:_reduced", f"{TESTS}::test_rows_that_are_not_finite_on_another_rank_are_nan")
def infinite_maximum_becomes_finite(original: Any) -> Any:
    return lambda maxima, group: original([part.nan_to_num() for part in maxima], group)


@mutant("megatron.mpu.fp8:RowwiseProducts.input_grad", NEAR)
def input_gradient_has_scales_along_the_wrong_axis(original: Any) -> Any:
    def input_grad(self: Any, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        maxima = fp8_quantize.row_maxima(weight)
        quantized = fp8_quantize.quantize_rows(weight, maxima).float() * fp8_quantize.scales_of(maxima).mean()
        return (grad.float() @ quantized).to(grad.dtype)

    return input_grad


@mutant("megatron.mpu.fp8_quantize:_cast", f"{TESTS}::test_values_above_the_maximum_are_clamped")
def cast_has_no_clamp(original: Any) -> Any:
    """As with torch 2.11, whose cast returns NaN above 448."""

    def cast(x: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
        values = x.float() * (448.0 / maxima.clamp(min=1e-12))
        return values.masked_fill(values.abs() > 448.0, torch.nan).to(torch.float8_e4m3fn)

    return cast


@mutant("tds.linear_function:_Linear.forward", NEAR)
def weight_gradient_is_computed_from_the_quantized_input(original: Any) -> Any:
    def forward(ctx: Any, x: torch.Tensor, *others: Any) -> torch.Tensor:
        rows = x.flatten(0, -2)
        maxima = fp8_quantize.row_maxima(rows)
        quantized = fp8_quantize.quantize_rows(rows, maxima).float() * fp8_quantize.scales_of(maxima).unsqueeze(1)
        return original(ctx, quantized.view(x.shape).to(x.dtype), *others)

    return forward


@mutant("megatron.mpu.fp8_quantize:power_of_two_scales", f"{TESTS}::test_scales_of_blocks_are_the_next_powers_of_two")
def scales_of_blocks_are_no_powers_of_two(original: Any) -> Any:
    return lambda maxima: fp8_quantize.scales_of(maxima)


@mutant("megatron.mpu.fp8_weights:free", f"{WEIGHTS}::test_products_after_an_update_have_the_new_weight[rowwise]")
def weights_of_the_step_before_are_kept(original: Any) -> Any:
    return lambda: None


@mutant(
    "megatron.costs.decoder_cost:DecoderCosts._fp8_savings", f"{COSTS}::test_stages_are_balanced_by_the_cost_of_fp8"
)
def stages_are_balanced_as_in_bf16(original: Any) -> Any:
    return lambda self: [0.0] * self.model.num_layers


@mutant(
    "megatron.models.common.model_args:ModelArgs.is_fp8_layer",
    "tests/models/common/test_fp8_layers.py::test_first_and_last_layers_are_in_bf16",
)
def first_layers_are_in_fp8(original: Any) -> Any:
    return lambda self, layer: bool(self.fp8_recipe)
