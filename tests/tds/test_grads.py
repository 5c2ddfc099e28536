"""The gradient norm of a replica counts each parameter once; clipping by it."""

from __future__ import annotations

import math

import pytest
import torch

import tds.grad_norm
from megatron import mpu
from megatron.mpu.groups import build_grid
from megatron.mpu.shard import Shard, set_shard, shard_of
from megatron.mpu.topology import Topology
from tds.grad_norm import clip_coefficient, global_norm, is_counted_in_norm, square_of_norm
from tests.helpers.harness import run_ranks
from tests.helpers.whole import random_tensor

# A replica of two stages with two tensor ranks each. Every number below is one whole gradient.
TIED, SHARDED, BIAS = (
    random_tensor(1, 10, 3),
    random_tensor(2, 4, 3),
    random_tensor(3, 3),
)  # the embedding, padded to 12 rows; per stage the rest


def local_gradients(grid):
    """Return (parameter, gradient) pairs of this rank."""
    t, p = grid.tensor.rank, grid.pipe.rank
    rows = torch.cat([TIED, torch.zeros(2, 3, dtype=torch.float64)])[6 * t : 6 * t + 6]
    tied = set_shard(torch.nn.Parameter(rows), Shard((10, 3), 0, 6 * t, 6 - 2 * t))
    tied.ds_pipe_replicated = p == 1
    sharded = set_shard(torch.nn.Parameter(SHARDED[2 * t : 2 * t + 2]), Shard((4, 3), 0, 2 * t, 2))
    bias = torch.nn.Parameter(BIAS)  # no layer marked it: all ranks hold it
    return [(tied, rows), (sharded, (p + 1) * sharded.detach()), (bias, (p + 1) * BIAS)]


def compute_norms(rank, size, dtype):
    grid = build_grid(Topology.from_world_size(size, tensor=2, pipe=2), rank)
    pairs = [(parameter, gradient.to(dtype)) for parameter, gradient in local_gradients(grid)]
    counted = [gradient for parameter, gradient in pairs if is_counted_in_norm(parameter, grid.tensor.rank)]
    groups = [grid.model.handle]
    norm = global_norm(counted, groups).item()
    assert mpu.global_norm(counted, model=grid.model).item() == norm, "the one for users takes our groups"
    return norm, global_norm([], groups).item()


def expected_norm():
    stages = torch.cat([SHARDED.flatten(), BIAS])
    return math.sqrt(TIED.square().sum() + stages.square().sum() + (2 * stages).square().sum())


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-7), (torch.bfloat16, 1e-2)]
)
def test_replicated_sharded_and_tied_parameters_count_once(dtype, tolerance):
    results = run_ranks(4, compute_norms, 4, dtype)
    assert len(set(results)) == 1, "all ranks must see the same norm"
    norm, empty = results[0]
    assert abs(norm - expected_norm()) <= tolerance * expected_norm()
    assert empty == 0.0


def test_norm_is_not_summed_over_replicas():
    results = run_ranks(8, compute_norms, 8, torch.float64)
    assert all(abs(replica_norm - expected_norm()) <= 1e-14 * expected_norm() for replica_norm, _ in results)


def norm_over_two_groups(rank):
    grid = build_grid(Topology.from_world_size(4, tensor=2, pipe=2), rank)
    gradients = [random_tensor(rank, 5).float(), random_tensor(rank + 9, 70_001).float()]
    groups = [grid.pipe.handle, None, grid.tensor.handle]
    return (
        global_norm(gradients, groups).item(),
        math.sqrt(
            sum(
                random_tensor(seed, n).float().double().square().sum()
                for r in range(4)
                for seed, n in ((r, 5), (r + 9, 70_001))
            )
        ),
    )


def test_norm_is_reduced_over_groups_in_sequence():
    results = run_ranks(4, norm_over_two_groups)
    assert len(set(results)) == 1
    norm, expected = results[0]
    assert abs(norm - expected) <= 1e-7 * expected


@pytest.mark.parametrize("tensor_rank", [0, 1])
@pytest.mark.parametrize("partition_dim", [None, 0, 1])
def test_sharded_parameters_are_counted_on_all_tensor_ranks(tensor_rank, partition_dim):
    parameter = set_shard(torch.nn.Parameter(torch.zeros(4, 4)), Shard((8, 8), partition_dim, 0, 4))
    assert is_counted_in_norm(parameter, tensor_rank) == (tensor_rank == 0 or shard_of(parameter).is_partitioned)


@pytest.mark.parametrize("name", ["model_parallel", "tensor_model_parallel"])
def test_model_parallel_mark_counts_parameter_on_all_ranks(name):
    parameter = torch.nn.Parameter(torch.zeros(4))
    assert [is_counted_in_norm(parameter, rank) for rank in (0, 1)] == [True, False]
    setattr(parameter, name, True)
    assert [is_counted_in_norm(parameter, rank) for rank in (0, 1)] == [True, True]


def test_norm_beyond_fp16_range_is_finite():
    large = [torch.full((1000,), 60000.0, dtype=torch.float16)]
    assert global_norm(large, []).item() == pytest.approx(60000.0 * math.sqrt(1000), rel=1e-6)


def test_non_finite_gradient_makes_norm_non_finite():
    assert not math.isfinite(global_norm([torch.ones(3), torch.tensor([math.inf])], []).item())
    assert not math.isfinite(global_norm([torch.ones(3), torch.tensor([math.nan])], []).item())


def test_clip_coefficient_applies_only_above_limit():
    assert clip_coefficient(4.0, 1.0) == pytest.approx(0.25, rel=1e-6)
    assert clip_coefficient(0.5, 1.0) == 1.0 and clip_coefficient(1.0, 1.0) == 1.0
    assert clip_coefficient(1e9, 0.0) == 1.0, "0 means no clipping"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (65536,), (66001,), (700, 300), (4_000_003,)], ids=str)
def test_square_of_norm_accumulates_in_fp64(shape, dtype):
    """One sum of fp32 over 4 million squares is off by 1.5e-4."""
    x = random_tensor(1, *shape).to(dtype)
    expected = x.double().square().sum()
    result = square_of_norm(x)
    assert result.dtype == torch.float64 and result.shape == ()
    assert abs(result - expected) <= 1e-6 * expected


def test_device_norms_use_one_call_per_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = tds.grad_norm.torch_api.norms_of_all
    monkeypatch.setattr(tds.grad_norm, "is_host", lambda device: False)
    monkeypatch.setattr(
        tds.grad_norm.torch_api, "norms_of_all", lambda tensors, dtype: calls.append(dtype) or original(tensors, dtype)
    )
    gradients = [random_tensor(n, 40 + n, 30).to(dtype) for n in range(3) for dtype in (torch.float32, torch.bfloat16)]
    gradients.append(random_tensor(9, 3000))
    norm = global_norm(iter(gradients), [])
    expected = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    assert norm.dtype == torch.float64 and abs(norm - expected) <= 1e-6 * expected
    assert calls == [torch.float32, torch.float32, torch.float64]
