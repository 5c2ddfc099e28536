"""The likeliest token: the same in every cut of the vocabulary, the lowest of equals, never padding."""

from __future__ import annotations

import pytest
import torch

from megatron.generate.sampling import NO_TOKEN, vocab_parallel_argmax
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
    "a NaN beside a larger number": ([0, 0, 0, NAN, 0, 0, 0, 9, 0], NO_TOKEN),
    "infinite": ([0, 0, 0, 0, 0, INF, 0, INF, 0], 5),
    "two that differ in the last bit": ([1, 1, 1, 1, 1, 1, 1 + 2**-52, 1, 1], 6),
}


def argmax_on_rank(rank: int, world_size: int, divisible_by: int, padding: float) -> list[int]:
    """Cut the rows over ``world_size`` ranks, with ``padding`` in the padded columns."""
    group = build_grid(Topology.from_world_size(world_size, tensor=world_size, pipe=1), rank).tensor
    num_rows, start, num_real = vocab_range(VOCAB, group, divisible_by)
    full_logits = torch.tensor([row for row, _ in ROWS.values()], dtype=torch.float64)
    local = torch.full((len(full_logits), num_rows), padding, dtype=torch.float64)
    local[:, :num_real] = full_logits[:, start : start + num_real]
    return vocab_parallel_argmax(local, vocab_size=VOCAB, divisible_by=divisible_by, group=group).tolist()


@pytest.mark.parametrize(("world_size", "divisible_by"), [(1, 1), (1, 8), (2, 1), (2, 8), (4, 1)])
def test_argmax_picks_lowest_of_ties_and_never_padding(world_size: int, divisible_by: int) -> None:
    expected = [token for _, token in ROWS.values()]
    for actual in run_ranks(world_size, argmax_on_rank, world_size, divisible_by, INF):
        assert dict(zip(ROWS, actual, strict=True)) == dict(zip(ROWS, expected, strict=True))
