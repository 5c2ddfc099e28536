"""The forms of buckets, of their sums, of norm and clipping are alike on the same input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.mpu import shard
from megatron.optim.zero import partition
from tds import gradients
from tests.harness import run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
SIZES = st.lists(st.integers(0, 40), max_size=14)
LIMITS = st.integers(1, 500)


@settings(max_examples=200, deadline=None)
@given(SIZES, LIMITS, st.sampled_from(DTYPES))
def test_parameters_of_one_dtype_are_cut_into_the_same_runs(sizes: list[int], limit: int, dtype: torch.dtype) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]
    factor = gradients.accurate_dtype(dtype).itemsize // dtype.itemsize  # bytes of the sum for one of the parameter
    one = [[id(p) for p in run] for run in gradients.buckets(parameters, limit)]
    other = [[id(p) for p in run] for run in gradients.buckets_bucket_order(parameters, factor * limit)]
    pieces = [partition.Piece(p, p, partition.ParamPartition(0, (0, p.numel()))) for p in parameters if p.numel()]
    third = [[id(piece.parameter) for piece in run] for run in partition.buckets(pieces, limit)]
    assert one == other == third


def _sums(rank: int, cases: list[Any]) -> bool:
    for shapes, dtype, transposed, factor in cases:
        torch.manual_seed(rank)
        made = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
        made = [each.t() if transposed and each.dim() == 2 else each for each in made]
        one, other = ([each.clone(memory_format=torch.preserve_format) for each in made] for _ in range(2))
        gradients.fly(one, dist.group.WORLD).land(factor)
        gradients.fly_flight(other, dist.group.WORLD).land(factor)
        if not all(map(torch.equal, one, other)):
            return False
    return True


@pytest.mark.parametrize("size", [2, 3])
def test_sums_have_the_same_bits(size: int) -> None:
    shapes = [[(5,)], [(3, 4)], [()], [(3, 4), (7,), ()], [(33, 65), (129,)]]
    factors = {torch.bfloat16: (1.0, 0.5)}  # by other ones tds multiplies more exactly; megatron sums in 32 bits or 64
    cases = [(s, d, t, f) for s in shapes for d in DTYPES for t in (False, True) for f in factors.get(d, (1.0, 0.3))]
    assert run_ranks(size, _sums, cases) == [True] * size


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 200_000), st.sampled_from(DTYPES), st.integers(0, 9))
def test_norms_differ_in_the_order_of_their_sums_alone(size: int, dtype: torch.dtype, seed: int) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    one, other = shard.global_norm([x, x]), gradients.global_norm([x, x], None, x.device)
    assert torch.allclose(one, other, rtol=1e-7, atol=0)
    if size < gradients.LARGE:
        assert torch.equal(one, other)


@pytest.mark.parametrize("tensor_rank", [0, 1])
@pytest.mark.parametrize("is_replicated", [False, True, None])
@pytest.mark.parametrize("partition_dim", ["unmarked", None, 0, 1])
def test_the_same_parameters_are_counted(tensor_rank: int, is_replicated: bool | None, partition_dim: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 4))
    if partition_dim != "unmarked":
        shard.set_shard(parameter, shard.Shard((8, 8), partition_dim, 0, 4))
    if is_replicated is not None:
        parameter.ds_pipe_replicated = is_replicated  # type: ignore[attr-defined]
    assert gradients.is_counted(parameter, tensor_rank) == shard.is_counted_in_norm(parameter, tensor_rank)


@settings(max_examples=200, deadline=None)
@given(st.floats(0, 1e6), st.floats(1e-3, 1e6))
def test_gradients_are_clipped_alike_but_at_the_very_bound(norm: float, bound: float) -> None:
    gradient = torch.ones(3, dtype=torch.float64)
    gradients.clip([gradient], torch.tensor(norm, dtype=torch.float64), bound)
    if bound - 2e-6 <= norm <= bound:
        assert gradients.clip_coefficient(norm, bound) == 1.0
    else:
        wanted = torch.full((3,), gradients.clip_coefficient(norm, bound), dtype=torch.float64)
        assert torch.allclose(gradient, wanted, rtol=1e-15, atol=0), "a tensor divides by way of its reciprocal"
