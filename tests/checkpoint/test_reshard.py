"""Weights and moments are bit-equal after any chain of layouts (rows K15 and K18).

Where a rank's part lies is arithmetic, so one process is all ranks of a layout here, one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.checkpoint import TensorRecord, open_checkpoint, save
from megatron.mpu.groups import SINGLE, Grid, Group
from megatron.mpu.shard import Shard
from megatron.mpu.topology import Topology
from megatron.optim import MixedPrecisionOptimizer
from megatron.training.state_records import make_moments, optimizer_records, weight_records
from tests.helpers.zero_weights import SHAPES, Weights, make_optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
NAMES = [f"weights/{name}" for name in SHAPES] + [f"optimizer/{key}/{name}" for key in MOMENTS for name in SHAPES]
TIED_WEIGHT = "table"  # the first and the last stage have it; the first writes it


@dataclass(frozen=True)
class Layout:
    """A grid of ranks, ZeRO's stage, and the type of the model's parameters."""

    tensor: int
    pipe: int
    data: int
    zero: int
    dtype: torch.dtype = torch.float32

    def grids(self) -> list[Grid]:
        """Return the grid of each rank; its groups know who is in them, and cannot talk."""
        topology = Topology(pipe=self.pipe, data=self.data, tensor=self.tensor)
        return [_grid(topology, rank) for rank in range(topology.world_size)]


def _grid(topology: Topology, rank: int) -> Grid:
    axes = (("tensor",), ("pipe",), ("data",), ("pipe", "tensor"), ("pipe", "data", "tensor"))
    ranks_by_axis = [next(ranks for ranks in topology.groups(*names) if rank in ranks) for names in axes]
    groups = [Group(ranks=tuple(ranks), rank=ranks.index(rank)) for ranks in ranks_by_axis]
    return Grid(topology, rank, *groups, host=groups[-1], tensor_host=groups[0])


LAYOUTS = st.builds(
    Layout,
    tensor=st.sampled_from([1, 2]),
    pipe=st.integers(1, 3),
    data=st.integers(1, 4),
    zero=st.integers(0, 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)


def _rank_records(module: Weights, optimizer: MixedPrecisionOptimizer, grid: Grid) -> list[TensorRecord]:
    """Return what a rank hands to ``save``: the tensors of its stage."""
    num_stages, stage = grid.topology.pipe, grid.pipe.rank
    stage_of = {name: weight_idx * num_stages // len(SHAPES) for weight_idx, name in enumerate(SHAPES)}
    records = []
    for record in [*weight_records(module, optimizer), *optimizer_records(module, optimizer)]:
        name = record.name.rpartition("/")[2]
        if stage_of.get(name) == stage:
            records.append(record)
        elif name == TIED_WEIGHT and stage == num_stages - 1:
            records.append(TensorRecord(record.name, record.tensor, record.shard, is_owner=False))
    return records


def _make_ranks(layout: Layout) -> list[list[TensorRecord]]:
    ranks = []
    for grid in layout.grids():
        module = Weights(grid)
        optimizer = make_optimizer(module, grid, layout.zero, dtype=layout.dtype)
        make_moments(optimizer)
        ranks.append(_rank_records(module, optimizer, grid))
        for record in ranks[-1]:
            record.shard.unpadded(record.tensor.detach()).fill_(-1.0)
    return ranks


def _random_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(SHAPES[name.rpartition("/")[2]], generator=generator) for name in NAMES}


def _save(ranks: list[list[TensorRecord]], root: Path, step: int) -> Path:
    return save(root, step, [record for records in ranks for record in records], {}, SINGLE)


@given(chain=st.lists(LAYOUTS, min_size=3, max_size=4))
@example(chain=[Layout(2, 1, 2, 1), Layout(1, 3, 1, 0, torch.bfloat16), Layout(2, 2, 4, 1), Layout(1, 1, 1, 0)])
@settings(max_examples=5, deadline=None, derandomize=True)
def test_tensors_survive_any_chain_of_layouts(chain: list[Layout], tmp_path_factory: pytest.TempPathFactory) -> None:
    root, state = tmp_path_factory.mktemp("chain"), _random_state()
    path = save(root, 0, [TensorRecord(name, value, _full_shard(value)) for name, value in state.items()], {}, SINGLE)
    for step, layout in enumerate(chain, start=1):
        ranks, before = _make_ranks(layout), open_checkpoint(path, SINGLE)
        for records in ranks:
            before.load(records)
            for record in records:
                expected = record.shard.narrow(state[record.name])
                assert torch.equal(record.shard.unpadded(record.tensor), expected), record.name
        path = _save(ranks, root, step)
        after = open_checkpoint(path, SINGLE)
        assert sorted(after.names()) == sorted(NAMES)
        for name, value in state.items():
            assert torch.equal(after.read(name, _full_shard(value)), value), (name, layout)


def _full_shard(value: torch.Tensor) -> Shard:
    return Shard(tuple(value.shape))
