"""Checkpoints of all ZeRO stages contain the same tensors, for any number of replicas (row K18)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.checkpoint import open_latest, save
from megatron.mpu.groups import SINGLE, Grid, build_grid
from megatron.mpu.shard import Shard
from megatron.mpu.topology import Topology
from megatron.optim import MixedPrecisionOptimizer
from megatron.training.state_records import make_moments, optimizer_records, set_optimizer_steps, weight_records
from tests.helpers.harness import run_ranks
from tests.helpers.zero_weights import (
    SHAPES,
    Weights,
    copy_weights,
    make_local_value,
    make_optimizer,
    make_shard,
    take_step,
)

STEPS = 3


def save_checkpoint(folder: Path, module: Weights, optimizer: MixedPrecisionOptimizer, grid: Grid) -> None:
    records = [*weight_records(module, optimizer), *optimizer_records(module, optimizer)]
    save(folder, STEPS, records, {}, grid.host)


def train_and_save(
    rank: int, tensor: int, size: int, stage: int, dtype: torch.dtype, folder: Path
) -> dict[str, torch.Tensor]:
    """Save after three steps; return the weights after two more."""
    grid = build_grid(Topology.from_world_size(size, tensor=tensor, pipe=1), rank)
    module = Weights(grid)
    optimizer = make_optimizer(module, grid, stage, dtype=dtype)
    for step in range(STEPS):
        take_step(module, optimizer, grid, step)
    save_checkpoint(folder, module, optimizer, grid)
    for step in range(STEPS, STEPS + 2):
        take_step(module, optimizer, grid, step)
    return copy_weights(module)


def load_and_save(
    rank: int, tensor: int, size: int, stage: int, dtype: torch.dtype, source: Path, folder: Path
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Load into other values and save again; return the loaded weights, and the weights after two more steps."""
    grid = build_grid(Topology.from_world_size(size, tensor=tensor, pipe=1), rank)
    module = Weights(grid)
    optimizer = make_optimizer(module, grid, stage, dtype=dtype)
    take_step(module, optimizer, grid, 99)
    make_moments(optimizer)
    records = [*weight_records(module, optimizer), *optimizer_records(module, optimizer)]
    open_latest(source, grid.host).load(records)
    optimizer.copy_main_params_to_parameters()
    set_optimizer_steps(optimizer, STEPS)
    loaded = copy_weights(module)
    save_checkpoint(folder, module, optimizer, grid)
    for step in range(STEPS, STEPS + 2):
        take_step(module, optimizer, grid, step)
    return loaded, copy_weights(module)


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Return every global tensor of the checkpoint in ``folder``."""
    saved = open_latest(folder, SINGLE)
    return {name: saved.read(name, Shard(saved.shape(name))) for name in saved.names()}


def unpadded(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return the logical tensor of the only tensor rank, without padding, in fp32."""
    return make_shard(name, 0, 1)[0].unpadded(tensor).float()


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_checkpoint_passes_stages_and_layouts_bitwise(dtype: torch.dtype, tmp_path: Path) -> None:
    plain_dir, sharded_dir = tmp_path / "plain", tmp_path / "cut"
    expected = run_ranks(2, train_and_save, 1, 2, 0, dtype, plain_dir)
    assert_same(expected[0], run_ranks(2, train_and_save, 1, 2, 1, dtype, sharded_dir)[1])
    reference = read_checkpoint(plain_dir)
    assert {"weights/table", "weights/frozen", "optimizer/exp_avg/scalar"} <= set(reference)
    assert_same(reference, read_checkpoint(sharded_dir))
    source = sharded_dir
    for tensor, size, stage in ((2, 4, 3), (1, 3, 1), (1, 1, 0), (1, 2, 2)):
        folder = tmp_path / f"{tensor}-{size}-{stage}"
        ranks = run_ranks(size, load_and_save, tensor, size, stage, dtype, source, folder)
        assert_same(reference, read_checkpoint(folder))
        for rank, (loaded, after) in enumerate(ranks):
            for name in SHAPES:
                shard, local = make_shard(name, rank % tensor, tensor)
                saved = reference[f"weights/{name}"].to(dtype)
                assert torch.equal(loaded[name], make_local_value(saved, shard, local).to(dtype)), name
                expected_weight = make_local_value(unpadded(expected[0][name], name), shard, local)
                assert torch.allclose(after[name].float(), expected_weight, rtol=0, atol=0 if tensor == 1 else 1e-6), (
                    name
                )
        source = folder
