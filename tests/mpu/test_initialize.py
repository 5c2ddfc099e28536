"""The one global of the project and Megatron's names for it."""

from __future__ import annotations

import pytest
import torch

from megatron import mpu
from tests.helpers.harness import run_ranks

FUNCTIONS_WITH_ARGUMENTS = ("get_batch_on_this_cp_rank",)
"""Names that are no views."""
VIEW_NAMES = [
    name for name in dir(mpu) if name.startswith(("get_", "is_pipeline")) and name not in FUNCTIONS_WITH_ARGUMENTS
]


@pytest.fixture(autouse=True)
def no_grid():
    mpu.destroy_model_parallel()
    yield
    mpu.destroy_model_parallel()


@pytest.mark.parametrize("name", VIEW_NAMES)
def test_view_raises_without_grid(name):
    with pytest.raises(RuntimeError, match="Call pretrain\\(\\) or initialize_model_parallel\\(\\) first"):
        getattr(mpu, name)()


def test_public_names_resolve_and_unknown_names_raise():
    assert all(getattr(mpu, name) is not None for name in dir(mpu))
    with pytest.raises(AttributeError, match="no attribute 'get_expert_parallel_rank'"):
        mpu.get_expert_parallel_rank  # noqa: B018


def test_single_process_needs_no_process_group():
    grid = mpu.initialize_model_parallel(1, 0)
    assert mpu.model_parallel_is_initialized() and mpu.get_grid() is grid
    assert [mpu.get_data_parallel_world_size(), mpu.get_pipe_parallel_world_size(), mpu.get_model_parallel_rank()] == [
        1,
        1,
        0,
    ]
    assert mpu.is_pipeline_first_stage() and mpu.is_pipeline_last_stage()
    mpu.destroy_model_parallel()
    assert not mpu.model_parallel_is_initialized()


def test_rejects_too_few_processes():
    with pytest.raises(ValueError, match="world_size=1, --model-parallel-size 2"):
        mpu.initialize_model_parallel(2, 1)


def run_views(rank):
    grid = mpu.initialize_model_parallel(tensor=2, pipe=2)
    data = {"text": torch.tensor([[rank, 7]])}
    text = mpu.broadcast_data(["text"], data, "int64")["text"]
    reduced = {}
    for axis in ("tensor", "pipe", "data", "model", "world"):
        value = torch.tensor([2.0**rank])
        mpu.all_reduce(value, getattr(grid, axis))
        reduced[axis] = int(value.item())
    ranks = {
        "tensor": (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()),
        "pipe": (mpu.get_pipe_parallel_rank(), mpu.get_pipeline_model_parallel_world_size()),
        "data": (mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()),
    }
    edges = (mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage(), mpu.get_tensor_model_parallel_src_rank())
    return ranks, edges, text.tolist(), reduced


def test_views_groups_and_broadcast_match_grid():
    for rank, (ranks, edges, text, reduced) in enumerate(run_ranks(8, run_views)):
        pipe, data, tensor = rank // 4, rank // 2 % 2, rank % 2
        assert ranks == {"tensor": (tensor, 2), "pipe": (pipe, 2), "data": (data, 2)}
        source = rank - tensor
        assert edges == (pipe == 0, pipe == 1, source)
        assert text == [[source, 7]], "data comes from the first rank of the own tensor group"
        assert reduced["tensor"] == 2**source + 2 ** (source + 1)
        assert reduced["pipe"] == 2 ** (rank % 4) + 2 ** (rank % 4 + 4)
        assert reduced["data"] == 2 ** (4 * pipe + tensor) + 2 ** (4 * pipe + tensor + 2)
        assert reduced["model"] == sum(2 ** (4 * p + 2 * data + t) for p in (0, 1) for t in (0, 1))
        assert reduced["world"] == 255


def reduce_on_host(rank, device_type):
    grid = mpu.initialize_model_parallel(tensor=2, pipe=1, device=torch.device(device_type))
    value = torch.tensor([2.0**rank])
    mpu.all_reduce(value, grid.tensor_host)
    is_same = [getattr(grid.tensor, name) == getattr(grid.tensor_host, name) for name in ("ranks", "rank", "handle")]
    return int(value.item()), is_same


def test_tensor_group_has_separate_host_group_unless_on_cpu():
    assert run_ranks(4, reduce_on_host, "cpu") == [(total, [True, True, True]) for total in (3, 3, 12, 12)]
    assert run_ranks(4, reduce_on_host, "meta") == [(total, [True, True, False]) for total in (3, 3, 12, 12)]
    assert run_ranks(2, reduce_on_host, "meta") == [(3, [True, True, False])] * 2
