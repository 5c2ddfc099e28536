"""Statistics of parts add up to those of the whole, and tell what a norm does not."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.debug.compare import statistics_error
from megatron.debug.statistics import join_statistics, measure, sum_statistics

FULL_TENSOR = torch.randn(6, 4, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_shard_statistics_add_up_to_full_statistics() -> None:
    full_statistics = measure(FULL_TENSOR)
    assert (full_statistics.count, full_statistics.norm, full_statistics.largest) == (
        240,
        pytest.approx(FULL_TENSOR.norm()),
        FULL_TENSOR.abs().max(),
    )
    assert full_statistics.mean == pytest.approx(FULL_TENSOR.mean())
    slices = [measure(FULL_TENSOR[..., :7]), measure(FULL_TENSOR[..., 7:], first_column=7)]
    samples = [measure(sample) for sample in FULL_TENSOR.split(1, dim=1)]
    for shards in (slices, samples):
        assert statistics_error(join_statistics(shards), full_statistics) < 1e-14
    misplaced_shards = [slices[0], measure(FULL_TENSOR[..., 7:])]
    assert statistics_error(join_statistics(misplaced_shards), full_statistics) > 0.01


def test_summed_statistics_detect_wrong_summand() -> None:
    first_summand = torch.randn(6, 4, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    summed_statistics = sum_statistics([measure(first_summand), measure(FULL_TENSOR - first_summand)])
    assert (summed_statistics.count, math.isnan(summed_statistics.norm), math.isnan(summed_statistics.largest)) == (
        240,
        True,
        True,
    )
    assert summed_statistics.mean == pytest.approx(FULL_TENSOR.mean())
    for first, second in (
        (summed_statistics, measure(FULL_TENSOR)),
        (measure(FULL_TENSOR), summed_statistics),
        (summed_statistics, summed_statistics),
    ):
        assert statistics_error(first, second) < 1e-14
    wrong_statistics = sum_statistics([measure(first_summand), measure(FULL_TENSOR - 1.001 * first_summand)])
    assert 1e-4 < statistics_error(measure(FULL_TENSOR), wrong_statistics) < 1e-2
    assert 1e-4 < statistics_error(summed_statistics, wrong_statistics) < 1e-2


@pytest.mark.parametrize("relative_size", [1e-1, 1e-3, 1e-6])
def test_sketch_detects_change_that_preserves_norm_mean_and_maximum(relative_size: float) -> None:
    row = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    swapped = row.clone()
    swapped[3], swapped[4] = row[4], row[3]  # places changed
    original = torch.zeros(1000, dtype=torch.float64)
    original[:50], original[50] = row, float((row - swapped).norm()) / relative_size
    changed = original.clone()
    changed[:50] = swapped
    original_statistics, changed_statistics = measure(original), measure(changed)
    assert (
        original_statistics.largest,
        original_statistics.count,
        original_statistics.norm,
        original_statistics.mean,
    ) == (
        changed_statistics.largest,
        changed_statistics.count,
        pytest.approx(changed_statistics.norm),
        pytest.approx(changed_statistics.mean),
    )
    expected = float((original - changed).norm() / original.norm())
    assert expected / 3 < statistics_error(original_statistics, changed_statistics) < 3 * expected


def test_nonfinite_values_are_counted_and_excluded() -> None:
    x = torch.tensor([[3.0, math.nan, 4.0], [math.inf, 0.0, -math.inf]])
    statistics = measure(x)
    assert (statistics.nan, statistics.inf, statistics.norm, statistics.largest, statistics.mean) == (
        1,
        2,
        5.0,
        4.0,
        pytest.approx(7 / 6),
    )
    assert not statistics.is_finite and math.isnan(x[0, 1])
    assert statistics_error(statistics, measure(x.nan_to_num(0.0, 0.0, 0.0))) == math.inf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_statistics_use_fp64(dtype: torch.dtype) -> None:
    x = torch.full((300, 300), 250.0, dtype=dtype)
    assert measure(x).norm == 250.0 * 300 and measure(x).mean == 250.0
    assert measure(x).times(-0.5).norm == 125.0 * 300 and measure(x).times(-0.5).mean == -125.0
