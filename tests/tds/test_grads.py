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
from tests.helpers.whole import random

# A replica of two stages with two tensor ranks each. Every number below is one whole gradient.
TIED, CUT, BIAS = (
    random(1, 10, 3),
    random(2, 4, 3),
    random(3, 3),
)  # the embedding, padded to 12 rows; per stage the rest


def held(grid):
    """Return (parameter, gradient) pairs of this rank."""
    t, p = grid.tensor.rank, grid.pipe.rank
    rows = torch.cat([TIED, torch.zeros(2, 3, dtype=torch.float64)])[6 * t : 6 * t + 6]
    tied = set_shard(torch.nn.Parameter(rows), Shard((10, 3), 0, 6 * t, 6 - 2 * t))
    tied.ds_pipe_replicated = p == 1
    cut = set_shard(torch.nn.Parameter(CUT[2 * t : 2 * t + 2]), Shard((4, 3), 0, 2 * t, 2))
    bias = torch.nn.Parameter(BIAS)  # no layer marked it: all ranks hold it
    return [(tied, rows), (cut, (p + 1) * cut.detach()), (bias, (p + 1) * BIAS)]


def norms(rank, size, dtype):
    grid = build_grid(Topology.of_world(size, tensor=2, pipe=2), rank)
    mine = [(parameter, gradient.to(dtype)) for parameter, gradient in held(grid)]
    counted = [gradient for parameter, gradient in mine if is_counted_in_norm(parameter, grid.tensor.rank)]
    groups = [grid.model.handle]
    norm = global_norm(counted, groups).item()
    assert mpu.global_norm(counted, model=grid.model).item() == norm, "the one for users takes our groups"
    return norm, global_norm([], groups).item()


def expected():
    stages = torch.cat([CUT.flatten(), BIAS])
    return math.sqrt(TIED.square().sum() + stages.square().sum() + (2 * stages).square().sum())


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-14), (torch.float32, 1e-7), (torch.bfloat16, 1e-2)])
def test_replicated_cut_and_tied_parameters_count_once(dtype, allowed):
    found = run_ranks(4, norms, 4, dtype)
    assert len(set(found)) == 1, "all ranks must see the same norm"
    norm, empty = found[0]
    assert abs(norm - expected()) <= allowed * expected()
    assert empty == 0.0


def test_two_replicas_do_not_add_up():
    norm = run_ranks(8, norms, 8, torch.float64)
    assert all(abs(found - expected()) <= 1e-14 * expected() for found, _ in norm)


def norm_over_two_groups(rank):
    grid = build_grid(Topology.of_world(4, tensor=2, pipe=2), rank)
    mine = [random(rank, 5).float(), random(rank + 9, 70_001).float()]
    groups = [grid.pipe.handle, None, grid.tensor.handle]
    return (
        global_norm(mine, groups).item(),
        math.sqrt(
            sum(
                random(seed, n).float().double().square().sum()
                for r in range(4)
                for seed, n in ((r, 5), (r + 9, 70_001))
            )
        ),
    )


def test_the_norm_is_taken_over_one_group_behind_the_other():
    found = run_ranks(4, norm_over_two_groups)
    assert len(set(found)) == 1
    norm, wanted = found[0]
    assert abs(norm - wanted) <= 1e-7 * wanted


@pytest.mark.parametrize("tensor_rank", [0, 1])
@pytest.mark.parametrize("partition_dim", [None, 0, 1])
def test_what_layers_mark_is_counted_as_the_shard_says(tensor_rank, partition_dim):
    parameter = set_shard(torch.nn.Parameter(torch.zeros(4, 4)), Shard((8, 8), partition_dim, 0, 4))
    assert is_counted_in_norm(parameter, tensor_rank) == (tensor_rank == 0 or shard_of(parameter).is_partitioned)


@pytest.mark.parametrize("name", ["model_parallel", "tensor_model_parallel"])
def test_what_a_script_of_megatron_marks_is_counted_on_all_ranks(name):
    parameter = torch.nn.Parameter(torch.zeros(4))
    assert [is_counted_in_norm(parameter, rank) for rank in (0, 1)] == [True, False]
    setattr(parameter, name, True)
    assert [is_counted_in_norm(parameter, rank) for rank in (0, 1)] == [True, True]


def test_a_norm_beyond_16_bits_is_finite():
    large = [torch.full((1000,), 60000.0, dtype=torch.float16)]
    assert global_norm(large, []).item() == pytest.approx(60000.0 * math.sqrt(1000), rel=1e-6)


def test_an_infinite_gradient_makes_the_norm_infinite():
    assert not math.isfinite(global_norm([torch.ones(3), torch.tensor([math.inf])], []).item())
    assert not math.isfinite(global_norm([torch.ones(3), torch.tensor([math.nan])], []).item())


def test_clipping_brings_a_large_norm_to_the_limit_and_leaves_a_small_one():
    assert clip_coefficient(4.0, 1.0) == pytest.approx(0.25, rel=1e-6)
    assert clip_coefficient(0.5, 1.0) == 1.0 and clip_coefficient(1.0, 1.0) == 1.0
    assert clip_coefficient(1e9, 0.0) == 1.0, "0 means no clipping"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (65536,), (66001,), (700, 300), (4_000_003,)], ids=str)
def test_squares_add_up_in_fp64_however_many_they_are(shape, dtype):
    """One sum of fp32 over 4 million squares is off by 1.5e-4."""
    x = random(1, *shape).to(dtype)
    wanted = x.double().square().sum()
    found = square_of_norm(x)
    assert found.dtype == torch.float64 and found.shape == ()
    assert abs(found - wanted) <= 1e-6 * wanted


def test_on_a_device_the_norms_of_all_gradients_of_a_type_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    plain = tds.grad_norm.torch_api.norms_of_all
    monkeypatch.setattr(tds.grad_norm, "is_host", lambda device: False)
    monkeypatch.setattr(
        tds.grad_norm.torch_api, "norms_of_all", lambda same, dtype: calls.append(dtype) or plain(same, dtype)
    )
    gradients = [random(n, 40 + n, 30).to(dtype) for n in range(3) for dtype in (torch.float32, torch.bfloat16)]
    gradients.append(random(9, 3000))
    norm = global_norm(iter(gradients), [])
    wanted = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    assert norm.dtype == torch.float64 and abs(norm - wanted) <= 1e-6 * wanted
    assert calls == [torch.float32, torch.float32, torch.float64]
