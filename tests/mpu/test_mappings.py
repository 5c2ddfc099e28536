"""The four functions into and out of the tensor-parallel region: values, gradients, and each other's transpose."""

from __future__ import annotations

import functools

import pytest
import torch

from megatron.mpu import mappings
from megatron.mpu.groups import SINGLE
from tests.helpers.harness import run_ranks
from tests.helpers.whole import random, whole_world

FUNCTIONS = {
    "copy": mappings.copy_to_tensor_region,
    "reduce": mappings.reduce_from_tensor_region,
    "scatter": mappings.scatter_to_tensor_region,
    "gather": mappings.gather_from_tensor_region,
}
ROWS, COLUMNS = 3, 8
SIZES = pytest.mark.parametrize("size", [2, 4])


def apply_all(rank, size):
    group = whole_world(rank, size)
    seen = {}
    for name, function in FUNCTIONS.items():
        x = x_of(name, rank, size).requires_grad_()
        kept = x.detach().clone()
        y = function(x, group)
        y.backward(grad_of(name, rank, size))
        assert torch.equal(x.detach(), kept)  # the input is left alone
        seen[name] = (y.detach(), x.grad)
    return seen


def x_of(name, rank, size):
    """The input: the same on all ranks for copy and scatter, each rank's own for reduce and gather."""
    own = name in ("reduce", "gather")
    return random(1 + rank if own else 1, ROWS, COLUMNS // size if name == "gather" else COLUMNS)


def grad_of(name, rank, size):
    """The gradient of the output: each rank's own for copy and scatter, the same for reduce and gather."""
    own = name in ("copy", "scatter")
    return random(50 + rank if own else 50, ROWS, COLUMNS // size if name == "scatter" else COLUMNS)


@functools.cache
def seen(size):
    return run_ranks(size, apply_all, size)


def equal_on_all(size, name, part, expected):
    for rank, results in enumerate(seen(size)):
        wanted = expected(rank)
        assert (results[name][part] - wanted).abs().max() <= 1e-14 * wanted.abs().max(), (name, rank)


def columns(x, rank, size):
    width = COLUMNS // size
    return x[:, rank * width : (rank + 1) * width]


@SIZES
def test_copy_keeps_the_input_and_sums_the_gradients(size):
    equal_on_all(size, "copy", 0, lambda rank: random(1, ROWS, COLUMNS))
    equal_on_all(size, "copy", 1, lambda rank: sum(grad_of("copy", other, size) for other in range(size)))


@SIZES
def test_reduce_sums_the_inputs_and_keeps_the_gradient(size):
    equal_on_all(size, "reduce", 0, lambda rank: sum(x_of("reduce", other, size) for other in range(size)))
    equal_on_all(size, "reduce", 1, lambda rank: grad_of("reduce", rank, size))


@SIZES
def test_scatter_takes_the_own_columns_and_joins_the_gradients(size):
    equal_on_all(size, "scatter", 0, lambda rank: columns(random(1, ROWS, COLUMNS), rank, size))
    joined = torch.cat([grad_of("scatter", other, size) for other in range(size)], dim=-1)
    equal_on_all(size, "scatter", 1, lambda rank: joined)


@SIZES
def test_gather_joins_the_inputs_and_takes_the_own_gradient(size):
    joined = torch.cat([x_of("gather", other, size) for other in range(size)], dim=-1)
    equal_on_all(size, "gather", 0, lambda rank: joined)
    equal_on_all(size, "gather", 1, lambda rank: columns(grad_of("gather", rank, size), rank, size))


def transposes(rank, size):
    """Backward of one function on the inputs of the other, beside the other's forward."""
    group = whole_world(rank, size)
    pairs = {}
    for one, other in (("copy", "reduce"), ("reduce", "copy"), ("scatter", "gather"), ("gather", "scatter")):
        y = x_of(other, rank, size)
        x = x_of(one, rank, size).requires_grad_()
        FUNCTIONS[one](x, group).backward(y)
        pairs[one] = (x.grad, FUNCTIONS[other](y, group))
    return pairs


@SIZES
def test_backward_of_each_is_forward_of_its_partner(size):
    for pairs in run_ranks(size, transposes, size):
        for name, (backward, forward) in pairs.items():
            assert torch.equal(backward, forward), name


def test_a_group_of_one_changes_nothing_and_needs_no_process_group():
    x = random(1, ROWS, COLUMNS)
    assert all(function(x, SINGLE) is x for function in FUNCTIONS.values())


def odd_width(rank, size):
    with pytest.raises(ValueError, match="last dimension .7. must be divisible by the group size .2."):
        mappings.scatter_to_tensor_region(torch.zeros(3, 7), whole_world(rank, size))


def test_a_width_that_does_not_divide_is_refused():
    run_ranks(2, odd_width, 2)
