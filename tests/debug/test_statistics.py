"""Statistics of parts add up to those of the whole, and tell what a norm does not."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.debug.compare import statistics_error
from megatron.debug.statistics import joined, measure, summed

WHOLE = torch.randn(6, 4, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_parts_in_any_cut_add_up_to_the_whole() -> None:
    whole = measure(WHOLE)
    assert (whole.count, whole.norm, whole.largest) == (240, pytest.approx(WHOLE.norm()), WHOLE.abs().max())
    assert whole.mean == pytest.approx(WHOLE.mean())
    slices = [measure(WHOLE[..., :7]), measure(WHOLE[..., 7:], first_column=7)]
    samples = [measure(part) for part in WHOLE.split(1, dim=1)]
    for parts in (slices, samples):
        assert statistics_error(joined(parts), whole) < 1e-14
    misplaced = [slices[0], measure(WHOLE[..., 7:])]
    assert statistics_error(joined(misplaced), whole) > 0.01


def test_of_a_sum_mean_and_sketch_are_known_and_tell_a_share_that_is_off() -> None:
    share = torch.randn(6, 4, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = summed([measure(share), measure(WHOLE - share)])
    assert (found.count, math.isnan(found.norm), math.isnan(found.largest)) == (240, True, True)
    assert found.mean == pytest.approx(WHOLE.mean())
    for one, other in ((found, measure(WHOLE)), (measure(WHOLE), found), (found, found)):
        assert statistics_error(one, other) < 1e-14
    off = summed([measure(share), measure(WHOLE - 1.001 * share)])
    assert 1e-4 < statistics_error(measure(WHOLE), off) < 1e-2
    assert 1e-4 < statistics_error(found, off) < 1e-2


@pytest.mark.parametrize("size", [1e-1, 1e-3, 1e-6])
def test_a_change_that_keeps_norm_mean_and_largest_number_is_seen_at_its_size(size: float) -> None:
    row = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    other = row.clone()
    other[3], other[4] = row[4], row[3]  # places changed
    part = torch.zeros(1000, dtype=torch.float64)
    part[:50], part[50] = row, float((row - other).norm()) / size
    changed = part.clone()
    changed[:50] = other
    a, b = measure(part), measure(changed)
    assert (a.largest, a.count, a.norm, a.mean) == (b.largest, b.count, pytest.approx(b.norm), pytest.approx(b.mean))
    wanted = float((part - changed).norm() / part.norm())
    assert wanted / 3 < statistics_error(a, b) < 3 * wanted


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    x = torch.tensor([[3.0, math.nan, 4.0], [math.inf, 0.0, -math.inf]])
    found = measure(x)
    assert (found.nan, found.inf, found.norm, found.largest, found.mean) == (1, 2, 5.0, 4.0, pytest.approx(7 / 6))
    assert not found.is_finite and math.isnan(x[0, 1])
    assert statistics_error(found, measure(x.nan_to_num(0.0, 0.0, 0.0))) == math.inf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_statistics_are_taken_in_fp64(dtype: torch.dtype) -> None:
    x = torch.full((300, 300), 250.0, dtype=dtype)
    assert measure(x).norm == 250.0 * 300 and measure(x).mean == 250.0
    assert measure(x).times(-0.5).norm == 125.0 * 300 and measure(x).times(-0.5).mean == -125.0
