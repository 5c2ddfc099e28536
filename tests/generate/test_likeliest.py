"""The likeliest token: the same in every cut of the vocabulary, the lowest of equals, never padding."""

from __future__ import annotations

import pytest
import torch

from megatron.generate.sampling import NONE, vocab_parallel_argmax
from megatron.mpu.groups import build_grid
from megatron.mpu.layers import vocab_range
from megatron.mpu.topology import Topology
from tests.helpers.harness import run_ranks

VOCAB = 9  # on 4 ranks: 3, 3, 3 and 0 real columns
NAN, INF = float("nan"), float("inf")
ROWS = {
    "one largest, on the last column": ([0.0] * 8 + [1.0], 8),
    "one largest, on the first column": ([1.0] + [0.0] * 8, 0),
    "equals on three ranks": ([0, 0, 5, 0, 5, 0, 5, 0, 0], 2),
    "equals within a rank": ([0, 0, 0, 0, 5, 5, 0, 0, 0], 4),
    "all equal": ([-3.0] * 9, 0),
    "all below padding's 0": ([-9, -8, -7, -6, -5, -4, -3, -2, -1], 8),
    "a NaN beside a larger number": ([0, 0, 0, NAN, 0, 0, 0, 9, 0], NONE),
    "infinite": ([0, 0, 0, 0, 0, INF, 0, INF, 0], 5),
    "two that differ in the last bit": ([1, 1, 1, 1, 1, 1, 1 + 2**-52, 1, 1], 6),
}


def chosen(rank: int, size: int, divisible_by: int, padding: float) -> list[int]:
    """Cut the rows over ``size`` ranks, with ``padding`` in the padded columns."""
    group = build_grid(Topology.of_world(size, tensor=size, pipe=1), rank).tensor
    rows, start, num_real = vocab_range(VOCAB, group, divisible_by)
    whole = torch.tensor([row for row, _ in ROWS.values()], dtype=torch.float64)
    local = torch.full((len(whole), rows), padding, dtype=torch.float64)
    local[:, :num_real] = whole[:, start : start + num_real]
    return vocab_parallel_argmax(local, vocab_size=VOCAB, divisible_by=divisible_by, group=group).tolist()


@pytest.mark.parametrize(("size", "divisible_by"), [(1, 1), (1, 8), (2, 1), (2, 8), (4, 1)])
def test_the_lowest_of_the_largest_wins_in_every_cut_and_padding_never(size: int, divisible_by: int) -> None:
    wanted = [token for _, token in ROWS.values()]
    for got in run_ranks(size, chosen, size, divisible_by, INF):
        assert dict(zip(ROWS, got, strict=True)) == dict(zip(ROWS, wanted, strict=True))
