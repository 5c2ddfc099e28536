"""The short convolution equals a sum over taps in fp64, at document starts too, and with tokens before the sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.ops.short_convolution import short_convolution
from tests.helpers.recurrent_samples import draw_starts, values_and_grads, worst_difference
from tests.helpers.whole import random_tensor

TOLERANCE = 1e-12


def loop(
    x: torch.Tensor, left: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, starts: torch.Tensor | None
) -> torch.Tensor:
    """Return the convolution, computed token by token."""
    num_left, rows = left.shape[1], []
    tokens = torch.cat((left, x), dim=1)
    for sample in range(len(x)):
        for idx in range(x.shape[1]):
            first = -num_left if starts is None else max(-num_left, int(starts[sample, idx]))
            distances = [d for d in range(weight.shape[1]) if idx - d >= first]
            rows.append(bias + sum(tokens[sample, num_left + idx - d] * weight[:, -1 - d] for d in distances))
    return torch.stack(rows).view_as(x)


@settings(max_examples=30)
@given(length=st.integers(1, 9), kernel_size=st.integers(1, 5), has_starts=st.booleans(), data=st.data())
def test_values_and_gradients_match_sum_over_taps(length: int, kernel_size: int, has_starts: bool, data: Any) -> None:
    x, left, weight, bias = (
        random_tensor(idx, *shape)
        for idx, shape in enumerate([(2, length, 3), (2, kernel_size - 1, 3), (3, kernel_size), (3,)])
    )
    starts = draw_starts(data.draw, 2, length) if has_starts else None

    def convolve(x: torch.Tensor, left: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return short_convolution(x, weight, bias, starts=starts, left=left)

    inputs = (x, left, weight, bias)
    expected = values_and_grads(lambda *leaves: loop(*leaves, starts), inputs)
    assert worst_difference(values_and_grads(convolve, inputs), expected) <= TOLERANCE


def test_matches_torch_convolution_without_documents() -> None:
    x, weight = random_tensor(0, 2, 7, 3), random_tensor(1, 3, 4)
    expected = F.conv1d(x.transpose(1, 2), weight.unsqueeze(1), padding=3, groups=3)[..., :7].transpose(1, 2)
    torch.testing.assert_close(short_convolution(x, weight), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sum_of_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x, weight = random_tensor(0, 2, 7, 3).to(dtype), random_tensor(1, 3, 4).to(dtype)
    output = short_convolution(x, weight)
    assert output.dtype == dtype
    assert output.equal(short_convolution(x.float(), weight.float()).to(dtype))
