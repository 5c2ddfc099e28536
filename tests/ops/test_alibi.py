"""Slopes as in the paper and in Hugging Face's MPT, biases by distance, and what 16 bits make of them."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.ops.attention import attention, mask_value
from megatron.ops.positions import alibi_bias, alibi_slopes, mask_other_documents


def paper_slopes(num_heads: int) -> list[float]:
    """Return what the appendix of the paper computes: of a power of two, and what twice as many add."""
    if math.log2(num_heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(num_heads) - 3)))
        return [start * start**i for i in range(num_heads)]
    closest = 2 ** math.floor(math.log2(num_heads))
    return paper_slopes(closest) + paper_slopes(2 * closest)[0::2][: num_heads - closest]


def test_eight_heads_have_slopes_from_half_to_256th() -> None:
    assert alibi_slopes(8) == [1 / 2**k for k in range(1, 9)]
    assert alibi_slopes(12)[:8] == alibi_slopes(8)
    assert alibi_slopes(4, 16) == [2**-4, 2**-8, 2**-12, 2**-16]


@pytest.mark.parametrize("bias_max", [8, 16])
def test_slopes_match_paper_and_hugging_face(bias_max: int) -> None:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    for num_heads in range(1, 49):
        slopes = torch.tensor(alibi_slopes(num_heads, bias_max), dtype=torch.float64)
        hf_slopes = -build_mpt_alibi_tensor(num_heads, 2, bias_max)[:, 0, 0].double()  # one token away
        torch.testing.assert_close(slopes, hf_slopes, rtol=1e-7, atol=0)  # theirs are made in fp32
        if bias_max == 8:
            paper = torch.tensor(paper_slopes(num_heads), dtype=torch.float64)
            torch.testing.assert_close(slopes, paper, rtol=1e-12, atol=0)


def test_bias_is_negative_slope_times_distance_and_causal() -> None:
    slopes = torch.tensor([0.5, 0.125], dtype=torch.float64)
    actual = alibi_bias(slopes, torch.tensor([[1, 3]]), torch.arange(4), torch.float64)  # queries 1 and 3
    low = mask_value(torch.float64)
    first = [[-0.5, 0.0, low, low], [-1.5, -1.0, -0.5, 0.0]]
    second = [[-0.125, 0.0, low, low], [-0.375, -0.25, -0.125, 0.0]]
    assert actual.tolist() == [[first, second]]


def test_documents_match_standalone_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 9, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    segments = torch.tensor([[0] * 4 + [1] * 5, [0] * 7 + [1] * 2])
    slopes, positions = torch.tensor(alibi_slopes(3), dtype=torch.float64), torch.arange(9)
    bias = alibi_bias(slopes, positions.unsqueeze(0), positions, torch.float64)
    packed = attention(query, key, value, mask=mask_other_documents(bias, segments))
    for row, end in enumerate((4, 7)):
        for span in (slice(0, end), slice(end, 9)):
            qkv = (x[row : row + 1, :, span] for x in (query, key, value))
            document_range = range(9)[span]
            standalone = attention(*qkv, mask=bias[:, :, : len(document_range), : len(document_range)])
            torch.testing.assert_close(packed[row : row + 1, :, span], standalone, rtol=1e-13, atol=1e-13)


def test_16_bit_bias_is_accurate_enough() -> None:
    """Exact up to a distance of 256 where slopes are powers of two; beyond to ``2 ** -8`` of itself."""
    near, far = torch.tensor([[256]]), torch.tensor([[4095]])
    dtypes = (torch.float64, torch.bfloat16)
    slopes = torch.tensor(alibi_slopes(8), dtype=torch.float64)
    exact, rounded = (alibi_bias(slopes, near, torch.arange(257), dtype) for dtype in dtypes)
    assert rounded.double().equal(exact)
    slopes = torch.tensor(alibi_slopes(12), dtype=torch.float64)
    exact, rounded = (alibi_bias(slopes, far, torch.arange(4096), dtype) for dtype in dtypes)
    assert ((rounded.double() - exact).abs() <= 2**-8 * exact.abs()).all()
    difference = (exact.softmax(-1) - rounded.double().softmax(-1)).abs().sum(-1).max()
    assert difference <= 2e-3  # of the probability of a query that sees 4,096 keys; observed 1.2e-3
