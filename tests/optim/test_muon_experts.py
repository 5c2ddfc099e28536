"""Muon with distributed experts: each expert's momentum has one owner among the ranks that hold the expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron.mpu.expert_parallel import set_expert
from megatron.mpu.groups import Grid, build_grid, single_grid
from megatron.mpu.matrices import set_matrices
from megatron.mpu.shard import Shard, set_shard, shard_of
from megatron.mpu.topology import Topology
from megatron.optim import MuonArgs, build_optimizer, muon
from megatron.optim.moment2 import AdaptiveArgs
from tests.helpers.harness import run_ranks
from tests.helpers.whole import random_tensor

EP, STEPS = 2, 3
SHAPES = {"packed": (48, 16), "rows": (16, 32), "expert up": (32, 24), "expert down": (24, 16)}
PARTITION_DIMS = {"packed": 0, "rows": 1, "expert up": 0, "expert down": 1}
ARGS = {
    "none": MuonArgs(fp32_matmul_prec="highest", scale_mode="unit_rms_norm"),
    "adamuon": MuonArgs(fp32_matmul_prec="highest", adaptive=AdaptiveArgs("adamuon")),
    "normuon": MuonArgs(fp32_matmul_prec="highest", coefficient_type="quintic", adaptive=AdaptiveArgs("normuon")),
}


def full_value(name: str, expert: int, seed: int) -> torch.Tensor:
    """Return the values of a weight, or its gradient; experts differ from each other."""
    number = list(SHAPES).index(name) + 10 * expert * name.startswith("expert")
    return random_tensor(100 * seed + number, *SHAPES[name])


def make_weights(grid: Grid, expert: int, *, is_distributed: bool) -> dict[str, nn.Parameter]:
    """Return the weights of one rank, which holds the experts of number ``expert``."""
    weights = {}
    for name, shape in SHAPES.items():
        dim = PARTITION_DIMS[name]
        group = grid.expert_tensor if name.startswith("expert") else grid.tensor
        size = shape[dim] // group.size
        shard = Shard(shape, dim, group.rank * size, size)
        weight = set_shard(nn.Parameter(shard.narrow(full_value(name, expert, 0)).contiguous()), shard)
        set_matrices(weight, (2, 1) if name == "packed" else ())
        weights[name] = set_expert(weight) if is_distributed and name.startswith("expert") else weight
    return weights


def train(weights: dict[str, nn.Parameter], expert: int, args: MuonArgs, **options: Any) -> dict[str, torch.Tensor]:
    """Take steps with predefined gradients; return the full weights, and the local states by name."""
    optimizer = build_optimizer(
        weights.values(), name="muon", lr=0.1, weight_decay=0.1, dtype=torch.float64, muon=args, **options
    )
    for step in range(STEPS):
        for name, weight in weights.items():
            main_param = optimizer.main_param_of(weight)
            gradient = shard_of(main_param).narrow(full_value(name, expert, step + 1))
            main_param.grad = gradient.contiguous()
        optimizer.update_main_params()
    optimizer.copy_main_params_to_parameters()
    return {name: weight.detach() for name, weight in weights.items()}


def compare_ranks(rank: int, world_size: int, sizes: dict[str, int]) -> dict[str, float]:
    """Return the largest difference of this rank's weights from one process that holds the same expert."""
    grid = build_grid(Topology.from_world_size(world_size, pipe=1, **sizes), rank)
    groups = {"tensor": grid.tensor, "data": grid.data_context, "expert_data": grid.expert_data}
    groups["expert_tensor"] = grid.expert_tensor
    expert, differences = grid.expert.rank, {}
    for method, args in ARGS.items():
        single = single_grid()
        expected = train(make_weights(single, expert, is_distributed=False), expert, args)
        for stage in (0, 1, 3):
            weights = make_weights(grid, expert, is_distributed=True)
            for name, weight in train(weights, expert, args, zero_stage=stage, **groups).items():
                full = shard_of(weights[name]).narrow(expected[name])
                difference = (weight - full).abs().max().item()
                differences[f"{method}, ZeRO {stage}"] = max(
                    difference, differences.get(f"{method}, ZeRO {stage}", 0.0)
                )
    return differences


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (4, {"tensor": 1, "expert": EP}),
        (2, {"tensor": 2, "expert": 1, "expert_tensor": 1}),  # one replica, whose ranks hold copies of the experts
        pytest.param(8, {"tensor": 2, "expert": EP}, marks=pytest.mark.slow),
        pytest.param(4, {"tensor": 2, "expert": EP, "expert_tensor": 1}, marks=pytest.mark.slow),
    ],
)
def test_expert_updates_equal_those_of_one_process(world_size: int, sizes: dict[str, int]) -> None:
    for differences in run_ranks(world_size, compare_ranks, world_size, sizes):
        assert len(differences) == 9 and max(differences.values()) <= 1e-12, differences


def count_owned(rank: int, stage: int) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices that this rank orthogonalizes in one step."""
    grid = build_grid(Topology.from_world_size(4, tensor=1, pipe=1, expert=EP), rank)
    shapes: list[tuple[int, ...]] = []
    newton_schulz = muon.newton_schulz

    def record_shape(update: torch.Tensor, *args: Any) -> torch.Tensor:
        shapes.append(tuple(update.shape))
        return newton_schulz(update, *args)

    muon.newton_schulz = record_shape
    weights = make_weights(grid, grid.expert.rank, is_distributed=True)
    groups = {"tensor": grid.tensor, "data": grid.data_context, "expert_data": grid.expert_data}
    train(weights, grid.expert.rank, ARGS["none"], zero_stage=stage, **groups)
    return shapes


@pytest.mark.parametrize("stage", [0, 1])
def test_each_expert_matrix_has_one_owner(stage: int) -> None:
    """A dense matrix has one owner among four replicas, an expert's matrix one among the expert's two replicas."""
    shapes_by_rank = run_ranks(4, count_owned, stage)
    dense, experts = [(32, 16), (16, 16), (16, 32)], [(32, 24), (24, 16)]
    expected = STEPS * (dense + 2 * experts)
    assert sorted(shape for shapes in shapes_by_rank for shape in shapes) == sorted(expected)
    assert all(shapes_by_rank), "no rank is idle"
