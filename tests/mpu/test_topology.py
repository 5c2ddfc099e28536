"""The grid of ranks as arithmetic, against its definition and against DeepSpeed's."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import pytest
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.mpu.topology import AXES, Coordinate, Topology

size = st.integers(1, 4)
grids = st.builds(Topology, pipe=size, data=size, tensor=size, context=st.integers(1, 3))
quick = settings(deadline=None, max_examples=30)


@quick
@given(grids)
def test_rank_and_coordinate_are_inverse(grid):
    ranks = range(grid.world_size)
    assert [grid.rank(grid.coordinate(rank)) for rank in ranks] == list(ranks)
    axes = (range(each) for each in (grid.pipe, grid.data, grid.tensor, grid.context))
    every = {Coordinate(*place) for place in product(*axes)}
    assert {grid.coordinate(rank) for rank in ranks} == every


@quick
@given(grids)
def test_groups_along_any_axes_partition_the_ranks(grid):
    for count in range(len(AXES) + 1):
        for axes in combinations(AXES, count):
            groups = grid.groups(*axes)
            assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
            for group in groups:
                assert group == sorted(group)
                for axis in set(AXES) - set(axes):
                    assert len({getattr(grid.coordinate(rank), axis) for rank in group}) == 1
                for axis in axes:
                    assert {getattr(grid.coordinate(rank), axis) for rank in group} == set(range(getattr(grid, axis)))


@quick
@given(grids)
def test_ranks_and_groups_are_those_of_deepspeed_to_which_data_and_context_are_one(grid):
    theirs = PipeModelDataParallelTopology(num_pp=grid.pipe, num_mp=grid.tensor, num_dp=grid.data_context)
    for rank in range(grid.world_size):
        place = grid.coordinate(rank)
        data = place.data * grid.context + place.context
        assert theirs.get_rank(pipe=place.pipe, data=data, model=place.tensor) == rank
    for axes, name in ((["pipe"], "pipe"), (["data", "context"], "data"), (["tensor"], "model")):
        if prod(getattr(grid, axis) for axis in axes) > 1:  # DeepSpeed lists no groups of one
            assert sorted(grid.groups(*axes)) == sorted(theirs.get_axis_comm_lists(name))


def test_a_tensor_group_is_made_of_neighbours_and_pipe_runs_slowest():
    grid = Topology(pipe=2, data=2, tensor=2)
    assert grid.groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.groups("pipe", "tensor") == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_the_data_axis_takes_what_the_others_leave():
    assert Topology.of_world(8, tensor=2, pipe=2) == Topology(pipe=2, data=2, tensor=2)
    assert Topology.of_world(16, tensor=2, pipe=2, context=2) == Topology(pipe=2, data=2, tensor=2, context=2)


def test_a_world_that_does_not_divide_is_refused_with_the_numbers():
    message = r"world_size=6, --model-parallel-size 2, --pipe-parallel-size 2 \(2 x 2 = 4\). Start 8 processes"
    with pytest.raises(ValueError, match=message):
        Topology.of_world(6, tensor=2, pipe=2)
    with pytest.raises(ValueError, match=r"--context-parallel-size 2 \(2 x 1 x 2 = 4\). Start 8 processes"):
        Topology.of_world(6, tensor=2, pipe=1, context=2)


def test_context_runs_between_tensor_and_data_as_in_megatron():
    grid = Topology(pipe=2, data=2, tensor=2, context=2)
    assert grid.groups("context")[:3] == [[0, 2], [1, 3], [4, 6]]
    assert grid.groups("data", "context")[0] == [0, 2, 4, 6]
    assert grid.sizes() == {"pipe": 2, "data": 2, "tensor": 2, "context": 2}
    assert Topology(pipe=2, data=2, tensor=2).sizes() == {"pipe": 2, "data": 2, "tensor": 2}, "as before this axis"


def test_an_unknown_axis_is_refused():
    with pytest.raises(ValueError, match=r"got \['model'\]"):
        Topology(1, 1, 1).groups("model")
