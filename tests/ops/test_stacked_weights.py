"""Weights in one storage are read as one tensor; all others are copied."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.ops.stacked_weights import distance_of, share_storage, stacked

BF16 = torch.bfloat16


def make_weights(num_weights: int, *shape: int, dtype: torch.dtype = BF16) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for _ in range(num_weights)]


@pytest.mark.parametrize(("num_weights", "shape"), [(5, (24, 16)), (1, (8, 8)), (3, (4, 4))])
def test_shared_storage_is_read_as_view(num_weights: int, shape: tuple[int, int]) -> None:
    weights = make_weights(num_weights, *shape)
    originals, values = list(weights), [weight.detach().clone() for weight in weights]
    assert (distance_of(weights) is None) == (num_weights > 1)
    share_storage(weights)
    assert all(weight is original and weight.is_leaf for weight, original in zip(weights, originals, strict=True))
    view = stacked(weights)
    assert view.equal(torch.stack(values)) and not view.requires_grad and view.is_contiguous()
    with torch.no_grad():
        weights[-1].fill_(3)
    assert view[-1].eq(3).all()


def test_weights_at_constant_distance_need_not_be_adjacent() -> None:
    """As under ZeRO 3, where both projections of an expert follow each other."""
    memory = torch.randn(4 * (128 + 64))
    up_weights = [memory[192 * idx :][:128].view(8, 16) for idx in range(4)]
    down_weights = [memory[192 * idx + 128 :][:64].view(8, 8) for idx in range(4)]
    for weights in (up_weights, down_weights):
        view = stacked(weights)
        assert view.equal(torch.stack(weights)) and view.stride(0) == distance_of(weights) == 192
        weights[2][0, 0] = 7
        assert view[2, 0, 0] == 7


def slices(*starts: int, numel: int = 64) -> list[torch.Tensor]:
    """Return matrices [8, 8] in one storage, at ``starts``."""
    memory = torch.arange(4 * 128, dtype=torch.float32).to(BF16)
    return [memory[start : start + numel].view(8, 8) for start in starts]


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param(make_weights(3, 8, 8), id="several storages"),
        pytest.param(slices(0, 64, 192), id="irregular distances"),
        pytest.param(slices(128, 64, 0), id="descending"),
        pytest.param(slices(0, 32, 64), id="overlapping"),
        pytest.param(slices(0, 68, 136), id="distance not aligned"),
        pytest.param(slices(4, 68, 132), id="start not aligned"),
        pytest.param([weight.t() for weight in slices(0, 64, 128)], id="transposed"),
        pytest.param([slices(0)[0], slices(64)[0], slices(128)[0]], id="equal positions in several storages"),
    ],
)
def test_other_weights_are_copied(weights: list[torch.Tensor]) -> None:
    assert distance_of(weights) is None
    copy = stacked(weights)
    assert copy.equal(torch.stack(tuple(weights)))
    copy.zero_()
    assert weights[1].any()


def test_weights_of_two_shapes_or_dtypes_are_not_stacked() -> None:
    memory = torch.zeros(256, dtype=BF16)
    assert distance_of([memory[:64].view(8, 8), memory[64:128].view(4, 16)]) is None
    assert distance_of([memory[:64].view(8, 8), memory.view(torch.float16)[64:128].view(8, 8)]) is None
    assert distance_of([memory[:64].view(8, 8), memory[64:128].view(8, 8)]) == 64
