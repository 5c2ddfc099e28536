"""The four functions into and out of the tensor-parallel region: values, gradients, and each other's transpose."""

from __future__ import annotations

import functools

import pytest
import torch

from megatron.mpu import mappings
from megatron.mpu.groups import SINGLE
from tests.helpers.harness import run_ranks
from tests.helpers.whole import group_of_all_ranks, random_tensor

FUNCTIONS = {
    "copy": mappings.copy_to_tensor_region,
    "reduce": mappings.reduce_from_tensor_region,
    "scatter": mappings.scatter_to_tensor_region,
    "gather": mappings.gather_from_tensor_region,
}
ROWS, COLUMNS = 3, 8
WORLD_SIZES = pytest.mark.parametrize("size", [2, 4])


def apply_all(rank, size):
    group = group_of_all_ranks(rank, size)
    results = {}
    for name, function in FUNCTIONS.items():
        x = make_input(name, rank, size).requires_grad_()
        original = x.detach().clone()
        y = function(x, group)
        y.backward(make_grad(name, rank, size))
        assert torch.equal(x.detach(), original)  # the input is left alone
        results[name] = (y.detach(), x.grad)
    return results


def make_input(name, rank, size):
    """The input: the same on all ranks for copy and scatter, each rank's own for reduce and gather."""
    varies_by_rank = name in ("reduce", "gather")
    return random_tensor(1 + rank if varies_by_rank else 1, ROWS, COLUMNS // size if name == "gather" else COLUMNS)


def make_grad(name, rank, size):
    """The gradient of the output: each rank's own for copy and scatter, the same for reduce and gather."""
    varies_by_rank = name in ("copy", "scatter")
    return random_tensor(50 + rank if varies_by_rank else 50, ROWS, COLUMNS // size if name == "scatter" else COLUMNS)


@functools.cache
def rank_results(size):
    return run_ranks(size, apply_all, size)


def check_all_ranks(size, name, output_idx, expected):
    for rank, results in enumerate(rank_results(size)):
        expected_tensor = expected(rank)
        assert (results[name][output_idx] - expected_tensor).abs().max() <= 1e-14 * expected_tensor.abs().max(), (
            name,
            rank,
        )


def rank_columns(x, rank, size):
    width = COLUMNS // size
    return x[:, rank * width : (rank + 1) * width]


@WORLD_SIZES
def test_copy_preserves_input_and_all_reduces_gradient(size):
    check_all_ranks(size, "copy", 0, lambda rank: random_tensor(1, ROWS, COLUMNS))
    check_all_ranks(size, "copy", 1, lambda rank: sum(make_grad("copy", other, size) for other in range(size)))


@WORLD_SIZES
def test_reduce_all_reduces_input_and_preserves_gradient(size):
    check_all_ranks(size, "reduce", 0, lambda rank: sum(make_input("reduce", other, size) for other in range(size)))
    check_all_ranks(size, "reduce", 1, lambda rank: make_grad("reduce", rank, size))


def reduce_in_place(rank, size):
    """Sum products in place and by copies; return both results and gradients, and whether the memory is the same."""
    group, results = group_of_all_ranks(rank, size), []
    for in_place in (False, True):
        x = random_tensor(1 + rank, ROWS, COLUMNS).requires_grad_()
        partial_sum = 3 * x
        pointer = partial_sum.data_ptr()
        y = mappings.reduce_from_tensor_region(partial_sum, group, in_place=in_place)
        assert (y.data_ptr() == pointer) == in_place
        (y + 1).square().sum().backward()
        results.append((y.detach(), x.grad))
    x = random_tensor(1, ROWS, COLUMNS).requires_grad_()
    y = mappings.reduce_from_tensor_region(x.exp(), group, in_place=True)  # exp saves its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with torch.no_grad():
        x = random_tensor(1 + rank, ROWS, COLUMNS) * 3
        assert mappings.reduce_from_tensor_region(x, group, in_place=True) is x and x.equal(results[0][0])
    return results


def test_in_place_reduction_equals_copy_and_detects_saved_inputs():
    for copied, overwritten in run_ranks(2, reduce_in_place, 2):
        assert all(map(torch.equal, copied, overwritten))


@WORLD_SIZES
def test_scatter_slices_columns_and_gathers_gradients(size):
    check_all_ranks(size, "scatter", 0, lambda rank: rank_columns(random_tensor(1, ROWS, COLUMNS), rank, size))
    gathered = torch.cat([make_grad("scatter", other, size) for other in range(size)], dim=-1)
    check_all_ranks(size, "scatter", 1, lambda rank: gathered)


@WORLD_SIZES
def test_gather_concatenates_inputs_and_slices_gradient(size):
    gathered = torch.cat([make_input("gather", other, size) for other in range(size)], dim=-1)
    check_all_ranks(size, "gather", 0, lambda rank: gathered)
    check_all_ranks(size, "gather", 1, lambda rank: rank_columns(make_grad("gather", rank, size), rank, size))


def run_transposes(rank, size):
    """Backward of one function on the inputs of the other, beside the other's forward."""
    group = group_of_all_ranks(rank, size)
    pairs = {}
    for name, partner in (("copy", "reduce"), ("reduce", "copy"), ("scatter", "gather"), ("gather", "scatter")):
        y = make_input(partner, rank, size)
        x = make_input(name, rank, size).requires_grad_()
        FUNCTIONS[name](x, group).backward(y)
        pairs[name] = (x.grad, FUNCTIONS[partner](y, group))
    return pairs


@WORLD_SIZES
def test_backward_equals_forward_of_transpose(size):
    for pairs in run_ranks(size, run_transposes, size):
        for name, (backward, forward) in pairs.items():
            assert torch.equal(backward, forward), name


def test_single_rank_group_is_identity():
    x = random_tensor(1, ROWS, COLUMNS)
    assert all(function(x, SINGLE) is x for function in FUNCTIONS.values())


def scatter_odd_width(rank, size):
    with pytest.raises(ValueError, match="last dimension .7. must be divisible by the group size .2."):
        mappings.scatter_to_tensor_region(torch.zeros(3, 7), group_of_all_ranks(rank, size))


def test_rejects_indivisible_width():
    run_ranks(2, scatter_odd_width, 2)
