"""Products in FP8: quantization, products, and equal quantized factors in every layout."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.mpu import fp8
from megatron.mpu.fp8 import BLOCKWISE, ROWWISE, RowwiseProducts, scaled_product, use_fp8
from megatron.mpu.fp8_quantize import (
    E4M3,
    column_maxima,
    expand_blocks,
    expand_row_blocks,
    power_of_two_scales,
    quantize_blocks,
    quantize_columns,
    quantize_row_blocks,
    quantize_rows,
    row_maxima,
    scales_of,
)
from megatron.mpu.groups import SINGLE
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.random import DropoutStreams, checkpoint
from megatron.mpu.shard import shard_of
from megatron.ops import grouped
from tds.engine.weight_grad_store import WeightGradStore
from tds.linear_function import linear
from tds.param_info import info_of, set_info
from tests.helpers.harness import run_ranks
from tests.helpers.whole import fill_shard, group_of_all_ranks

S, B, H, F = 4, 2, 256, 512
E4M3_STEP = 2**-4
"""Largest relative rounding error of an e4m3 number that is not subnormal."""


def random(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    sizes = torch.rand(shape[0], *[1] * (len(shape) - 1), generator=torch.Generator().manual_seed(seed + 1))
    return (values * 10 ** (4 * sizes - 2)).to(dtype)  # rows of different magnitude


X, W_UP, W_DOWN, GRAD = random(S, B, H, seed=1), random(F, H, seed=3), random(H, F, seed=5), random(S, B, H, seed=7)
GRAD_UP = random(S, B, F, seed=9)


# Quantization.


def test_rows_are_scaled_to_448() -> None:
    x = random(5, 37, seed=11)
    maxima = row_maxima(x)
    quantized, scales = quantize_rows(x, maxima), scales_of(maxima)
    assert quantized.dtype == E4M3
    assert torch.equal(quantized.float().abs().amax(1), torch.full((5,), 448.0))
    error = (quantized.double() * scales.double().unsqueeze(1) - x.double()).abs()
    smallest_step = scales.double().unsqueeze(1) * 2**-10  # half the step of subnormal numbers
    assert (error <= torch.maximum(E4M3_STEP * x.double().abs(), smallest_step) * 1.0001).all()


def test_values_above_the_maximum_are_clamped() -> None:
    """Values above the maximum become 448 with every version of torch."""
    x = random(5, 37, seed=11)
    assert torch.equal(quantize_rows(x, row_maxima(x) / 2).float().abs().amax(1), torch.full((5,), 448.0))


def test_columns_are_quantized_as_rows_of_the_transpose() -> None:
    x = random(5, 37, seed=13)
    assert torch.equal(column_maxima(x), row_maxima(x.t()))
    expected = quantize_rows(x.t(), row_maxima(x.t()))
    actual = quantize_columns(x, column_maxima(x))
    assert actual.is_contiguous()
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("recipe", [ROWWISE, BLOCKWISE])
def test_products_of_rows_that_are_not_finite_are_nan(value: float, recipe: str) -> None:
    x, weight = X.clone().flatten(0, 1), W_UP.clone()
    x[1, 3] = value
    use_fp8(weight, recipe, SINGLE, None)
    y = linear(x, weight)
    assert y[1].isnan().all()
    assert y[[0, 2, 3, 4, 5, 6, 7]].isfinite().all()


def test_rows_of_zeros_and_tiny_rows() -> None:
    x = torch.zeros(3, 16, dtype=torch.bfloat16)
    x[1] = 1e-38
    weight = random(16, 16, seed=15)
    for products in (RowwiseProducts(), fp8.BlockwiseProducts()):
        assert not products.forward(x, weight).any()
    assert RowwiseProducts().forward(x[:0], weight).shape == (0, 16)


def test_scales_of_blocks_are_the_next_powers_of_two() -> None:
    maxima = torch.tensor([448.0, 449.0, 447.0, 1.0, 3.5, 0.0])
    assert power_of_two_scales(maxima)[:5].tolist() == [1.0, 2.0, 1.0, 2**-8, 2**-7]
    x = random(130, 300, seed=17)
    quantized, scales = quantize_blocks(x)
    assert scales.shape == (2, 3)
    assert torch.equal(scales[1, 2], power_of_two_scales(x[128:, 256:].abs().amax().float()))
    dequantized = quantized.float() * expand_blocks(scales, x.shape)
    assert torch.equal(dequantized, dequantized.bfloat16().float()), "bf16 represents the values"
    rows, row_scales = quantize_row_blocks(x)
    assert torch.equal(row_scales[:, 1], power_of_two_scales(x[:, 128:256].abs().amax(1).float()))
    error = (rows.double() * expand_row_blocks(row_scales, 300) - x.double()).abs()
    assert (error <= torch.maximum(E4M3_STEP * x.double().abs(), expand_row_blocks(row_scales, 300) * 2**-10)).all()


# Products.


@pytest.mark.parametrize("recipe", [ROWWISE, BLOCKWISE])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_in_fp8_is_near_linear_in_fp64(recipe: str, has_bias: bool) -> None:
    """The weight gradient is exact: it is computed from the factors that are not quantized."""
    x, weight, bias = (t.detach().clone().requires_grad_() for t in (X, W_UP, random(F, seed=19)))
    use_fp8(weight, recipe, SINGLE, None)
    y = linear(x, weight, bias if has_bias else None)
    y.backward(GRAD_UP)
    wide_x, wide_weight = (t.detach().double() for t in (x, weight))
    expected = wide_x @ wide_weight.t() + (bias.detach().double() if has_bias else 0)
    assert x.grad is not None and weight.grad is not None
    for actual, wide in ((y.detach(), expected), (x.grad, GRAD_UP.double() @ wide_weight)):
        error = (actual.double() - wide).norm(dim=-1) / wide.norm(dim=-1)
        assert 0.005 < error.max() < 0.06, "the rounding of e4m3 shows, and is small for each token"
    assert torch.equal(weight.grad, GRAD_UP.flatten(0, 1).t() @ X.flatten(0, 1))
    assert bias.grad is None or torch.equal(bias.grad, GRAD_UP.flatten(0, 1).sum(0))


def test_scaled_mm_equals_products_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's CPU kernel takes the arguments that CUDA's kernel takes."""
    factors = quantize_rows(X.flatten(0, 1), row_maxima(X.flatten(0, 1))), quantize_rows(W_UP, row_maxima(W_UP))
    scales = scales_of(row_maxima(X.flatten(0, 1))), scales_of(row_maxima(W_UP))
    out = torch.empty(S * B, F, dtype=torch.bfloat16)
    expected = scaled_product(*factors, *scales, out.clone())
    monkeypatch.setattr(fp8, "USES_SCALED_MM", True)
    try:
        actual = scaled_product(*factors, *scales, out)
    except RuntimeError as error:
        pytest.skip(f"this torch has no products with scales per row on CPUs: {error}")
    assert ((actual.double() - expected.double()).abs() <= 2**-7 * expected.double().abs()).all()


def test_rows_do_not_depend_on_other_rows() -> None:
    """Micro-batches, and the rows of data, context and sequence shards, are rows of the full batch."""
    x = X.flatten(0, 1)
    for rows in (slice(0, 1), slice(3, 8)):
        maxima = row_maxima(x[rows])
        assert torch.equal(maxima, row_maxima(x)[rows])
        assert torch.equal(quantize_rows(x[rows], maxima).float(), quantize_rows(x, row_maxima(x))[rows].float())
        for part, whole in zip(quantize_row_blocks(x[rows]), quantize_row_blocks(x), strict=True):
            assert torch.equal(part.float(), whole[rows].float())


@pytest.mark.parametrize(("rows", "columns"), [(slice(128, 256), slice(None)), (slice(None), slice(128, 256))])
def test_blocks_of_shards_are_those_of_the_weight(rows: slice, columns: slice) -> None:
    for part, whole in zip(quantize_blocks(W_UP[rows, columns]), quantize_blocks(W_UP), strict=True):
        size = 1 if part.dtype == E4M3 else 128
        shard = (slice(*(None if i is None else i // size for i in (s.start, s.stop))) for s in (rows, columns))
        assert torch.equal(part.float(), whole[tuple(shard)].float())


@pytest.mark.parametrize("recipe", [ROWWISE, BLOCKWISE])
@pytest.mark.parametrize("implementation", [grouped.LOOP, grouped.GROUPED])
def test_products_of_experts_are_those_of_each_expert(
    recipe: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second expert has no rows; the last row is a dropped choice."""
    monkeypatch.setattr(grouped, "IMPLEMENTATION", implementation)
    counts = torch.tensor([3, 0, 4])
    weights = [random(F, H, seed=seed).requires_grad_() for seed in (21, 23, 25)]
    for weight in weights:
        use_fp8(weight, recipe, SINGLE, None)
    x = X.flatten(0, 1).clone().requires_grad_()
    y = grouped.grouped_linear(x, weights, counts)
    y[:7].backward(GRAD_UP.flatten(0, 1)[:7])
    expected_x = X.flatten(0, 1).clone().requires_grad_()
    rows = expected_x[:7].split(counts.tolist())
    expected = torch.cat([linear(part, weight) for part, weight in zip(rows, map(copied, weights), strict=True)])
    expected.backward(GRAD_UP.flatten(0, 1)[:7])
    assert x.grad is not None and expected_x.grad is not None
    assert torch.allclose(y[:7], expected, rtol=2**-7, atol=0) and torch.allclose(
        x.grad[:7], expected_x.grad[:7], rtol=2**-7, atol=0
    )


def copied(weight: torch.Tensor) -> torch.Tensor:
    return set_info(weight.detach().clone(), info_of(weight))


@pytest.mark.parametrize("way", ["deferred", "in place", "recompute"])
def test_other_ways_to_compute_the_gradients_change_no_bit(way: str) -> None:
    def run(way: str) -> tuple[Any, ...]:
        layer: Any = ColumnParallelLinear(H, F).bfloat16()
        fill_shard(layer.weight, W_UP)
        fill_shard(layer.bias, random(F, seed=19))
        use_fp8(layer.weight, ROWWISE, SINGLE, 0)
        x = X.clone().requires_grad_()
        if way == "deferred":
            store = WeightGradStore()
            with store.active():
                y = layer(x)
                with store.deferring((0, 0)):
                    y.backward(GRAD_UP)
                store.run((0, 0))
        elif way == "in place":
            grads: list[torch.Tensor] = []
            set_info(
                layer.weight,
                replace(info_of(layer.weight), add_product=lambda rows, inputs: grads.append(rows.t() @ inputs)),
            )
            y = layer(x)
            y.backward(GRAD_UP)
            layer.weight.grad = grads[0]
        elif way == "recompute":
            y = checkpoint(DropoutStreams(seed=0), layer, x)
            y.backward(GRAD_UP)
        else:
            y = layer(x)
            y.backward(GRAD_UP)
        return y.detach(), x.grad, layer.weight.grad, layer.bias.grad

    for actual, expected in zip(run(way), run("plain"), strict=True):
        assert torch.equal(actual, expected)


# Layouts.


@contextmanager
def recorded_products(calls: list[tuple[torch.Tensor, ...]]):
    """Record (bytes of both factors, scales of both factors) of each product in FP8."""
    original = fp8.scaled_product

    def record(a, b, a_scales, b_scales, out):
        calls.append((a.view(torch.uint8).clone(), b.view(torch.uint8).clone(), a_scales.clone(), b_scales.clone()))
        return original(a, b, a_scales, b_scales, out)

    fp8.scaled_product = record
    try:
        yield
    finally:
        fp8.scaled_product = original


def run_layers(rank: int, size: int, sequence_parallel: bool):
    """Return each layer's products in FP8, forward first, its output and its input gradient."""
    group = group_of_all_ranks(rank, size) if size > 1 else SINGLE
    results = {}
    for name, layer_class, weight, x, grad in (
        ("column", ColumnParallelLinear, W_UP, X, GRAD_UP), ("row", RowParallelLinear, W_DOWN, GRAD_UP, GRAD),
    ):  # fmt: skip
        layer = layer_class(*weight.shape[::-1], bias=False, group=group, sequence_parallel=sequence_parallel)
        layer.bfloat16()
        fill_shard(layer.weight, weight)
        use_fp8(layer.weight, ROWWISE, group, 0 if name == "column" else 1)
        is_row = name == "row"
        x, grad = x.chunk(size, -1)[rank] if is_row else x, grad if is_row else grad.chunk(size, -1)[rank]
        if sequence_parallel:
            x, grad = x if is_row else x.chunk(size)[rank], grad.chunk(size)[rank] if is_row else grad
        x = x.clone().requires_grad_()
        calls: list[tuple[torch.Tensor, ...]] = []
        with recorded_products(calls):
            y = layer(x)
            y.backward(grad)
        assert len(calls) == 2
        results[name] = calls, y.detach(), x.grad, layer.weight.grad, shard_of(layer.weight)
    return results


@pytest.mark.parametrize(("size", "sequence_parallel"), [(2, False), (2, True), (4, True)])
def test_quantized_factors_are_those_of_one_process(size: int, sequence_parallel: bool) -> None:
    expected = run_layers(0, 1, False)
    for rank, results in enumerate(run_ranks(size, run_layers, size, sequence_parallel)):
        for name, (calls, *_, weight_grad, shard) in results.items():
            whole_calls, *_, whole_weight_grad, _ = expected[name]
            for is_backward, (call, whole_call) in enumerate(zip(calls, whole_calls, strict=True)):
                is_inner_sharded = (name == "row") != bool(is_backward)
                a, b, a_scales, b_scales = whole_call
                if is_inner_sharded:
                    a, b = a.chunk(size, 1)[rank], b.chunk(size, 1)[rank]
                else:
                    b, b_scales = b.chunk(size)[rank], b_scales.chunk(size)[rank]
                for actual, whole in zip(call, (a, b, a_scales, b_scales), strict=True):
                    assert torch.equal(actual, whole), f"{name}, {'backward' if is_backward else 'forward'}"
            assert torch.equal(weight_grad, shard.narrow(whole_weight_grad))


def test_inverse_scales_are_rounded_once() -> None:
    """As in the kernels, for every mantissa of a maximum in bf16; torch computes a number / tensor in two steps."""
    values = torch.arange(128, 256) / 128
    rows = torch.minimum(values, values.unsqueeze(1)).bfloat16()
    inverse = torch.tensor([448.0 / value for value in values.tolist()])  # rounded to fp64, then to fp32
    expected = (rows.float() * inverse.unsqueeze(1)).to(torch.float8_e4m3fn)
    assert torch.equal(quantize_rows(rows, values).float(), expected.float())
    assert torch.equal(quantize_columns(rows.t(), values).float(), expected.float())


def forward_with_infinity(rank: int, size: int) -> torch.Tensor:
    """Return the output of a row-parallel layer whose first rank has an infinite input."""
    group = group_of_all_ranks(rank, size)
    layer: Any = RowParallelLinear(F, H, bias=False, group=group).bfloat16()
    fill_shard(layer.weight, W_DOWN)
    use_fp8(layer.weight, ROWWISE, group, 1)
    x = GRAD_UP.chunk(size, -1)[rank].clone()
    if rank == 0:
        x[1, 0, 3] = float("inf")
    return layer(x).detach()


def test_rows_that_are_not_finite_on_another_rank_are_nan() -> None:
    for y in run_ranks(2, forward_with_infinity, 2):
        assert y[1, 0].isnan().all()
        assert y.flatten(0, 1)[[0, 1, 3, 4, 5, 6, 7]].isfinite().all()
