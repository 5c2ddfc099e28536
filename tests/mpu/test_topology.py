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
    axes = (range(axis_size) for axis_size in (grid.pipe, grid.data, grid.tensor, grid.context))
    all_coordinates = {Coordinate(*coordinate) for coordinate in product(*axes)}
    assert {grid.coordinate(rank) for rank in ranks} == all_coordinates


@quick
@given(grids)
def test_groups_along_any_axes_partition_ranks(grid):
    for num_axes in range(len(AXES) + 1):
        for axes in combinations(AXES, num_axes):
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
def test_ranks_and_groups_match_deepspeed_topology(grid):
    deepspeed_topology = PipeModelDataParallelTopology(num_pp=grid.pipe, num_mp=grid.tensor, num_dp=grid.data_context)
    for rank in range(grid.world_size):
        coordinate = grid.coordinate(rank)
        data = coordinate.data * grid.context + coordinate.context
        assert deepspeed_topology.get_rank(pipe=coordinate.pipe, data=data, model=coordinate.tensor) == rank
    for axes, name in ((["pipe"], "pipe"), (["data", "context"], "data"), (["tensor"], "model")):
        if prod(getattr(grid, axis) for axis in axes) > 1:  # DeepSpeed lists no groups of one
            assert sorted(grid.groups(*axes)) == sorted(deepspeed_topology.get_axis_comm_lists(name))


def test_tensor_ranks_are_adjacent_and_pipe_varies_slowest():
    grid = Topology(pipe=2, data=2, tensor=2)
    assert grid.groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.groups("pipe", "tensor") == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_data_size_is_derived_from_world_size():
    assert Topology.from_world_size(8, tensor=2, pipe=2) == Topology(pipe=2, data=2, tensor=2)
    assert Topology.from_world_size(16, tensor=2, pipe=2, context=2) == Topology(pipe=2, data=2, tensor=2, context=2)


def test_rejects_indivisible_world_size():
    message = r"world_size=6, --model-parallel-size 2, --pipe-parallel-size 2 \(2 x 2 = 4\). Start 8 processes"
    with pytest.raises(ValueError, match=message):
        Topology.from_world_size(6, tensor=2, pipe=2)
    with pytest.raises(ValueError, match=r"--context-parallel-size 2 \(2 x 1 x 2 = 4\). Start 8 processes"):
        Topology.from_world_size(6, tensor=2, pipe=1, context=2)


def test_context_axis_is_between_tensor_and_data():
    grid = Topology(pipe=2, data=2, tensor=2, context=2)
    assert grid.groups("context")[:3] == [[0, 2], [1, 3], [4, 6]]
    assert grid.groups("data", "context")[0] == [0, 2, 4, 6]
    assert grid.axis_sizes() == {"pipe": 2, "data": 2, "tensor": 2, "context": 2}
    assert Topology(pipe=2, data=2, tensor=2).axis_sizes() == {"pipe": 2, "data": 2, "tensor": 2}, "as before this axis"


def test_rejects_unknown_axis():
    with pytest.raises(ValueError, match=r"got \['model'\]"):
        Topology(1, 1, 1).groups("model")


def test_former_names_warn_and_return_same_values():
    with pytest.warns(DeprecationWarning, match="Topology.of_world is now from_world_size"):
        topology = Topology.of_world(8, 2, 2)
    assert topology == Topology.from_world_size(8, 2, 2)
    with pytest.warns(DeprecationWarning, match="Topology.sizes is now axis_sizes"):
        assert topology.sizes() == topology.axis_sizes()
