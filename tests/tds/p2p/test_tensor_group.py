"""With tensor groups of two: partitioned tensors arrive whole, and every parameter counts once in the norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

import tds
from tds.p2p.message_header import DTYPES
from tds.p2p.packed_layout import PackedLayout, TensorGroup
from tds.p2p.tensor_meta import TensorMeta
from tds.pipe import LayerSpec, PipelineModule
from tests.helpers.harness import run_ranks
from tests.helpers.toys import (
    Dense,
    Toy,
    check_equal,
    grad_norm,
    make_engine,
    train_batch,
    train_reference,
    worst_relative_error,
)


def _pack_and_unpack(rank: int) -> None:
    tensor_group = TensorGroup(rank, 2, dist.group.WORLD)
    shapes = [(), (1,), (3, 5), (4, 2), (0, 3)]
    specs = [TensorMeta(dtype, shape, False, i % 3 != 0) for i, dtype in enumerate(DTYPES) for shape in shapes]
    for start in range(0, len(specs), 7):
        chunk = specs[start : start + 7]
        tensors = [torch.arange(torch.Size(spec.shape).numel()).view(spec.shape).to(spec.dtype) for spec in chunk]
        layout = PackedLayout(chunk, tensor_group)
        message = layout.pack(tensors)
        assert message.numel() == layout.num_bytes
        for sent, got in zip(tensors, layout.unpack(message), strict=True):
            assert got.dtype is sent.dtype and torch.equal(got, sent)
    partitioned_layout = PackedLayout([TensorMeta(torch.float32, (64, 32), True, True)], tensor_group)
    assert partitioned_layout.num_bytes == 64 * 32 * 4 / 2


def test_all_dtypes_and_shapes_are_sharded_and_gathered() -> None:
    run_ranks(2, _pack_and_unpack)


def _train_with_declarations(rank: int, toy: Toy, partitioned_flags: list[bool], num_stages: int) -> Any:
    tds.init_distributed("gloo", verbose=False)
    world = dist.get_world_size()
    topology = PipeModelDataParallelTopology(num_pp=num_stages, num_mp=2, num_dp=world // num_stages // 2)
    module = PipelineModule(toy.layer_specs(), topology=topology, loss_fn=toy.loss_fn, partition_method="uniform")
    if not partitioned_flags:
        pass
    elif toy.model_type == "chain":
        module._input_grad, module._input_type, module._input_pipe_partitioned = [True], ["float"], partitioned_flags
    else:
        module._input_grad = [True, False, True, False, False]
        module._input_type = ["float", "bool", "float", "int", "float"]
        module._input_pipe_partitioned = partitioned_flags
    return train_batch(make_engine(toy, num_stages, module=module), toy)


@pytest.mark.parametrize("rows", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_partitioned_boundaries_equal_one_process(rows: int) -> None:
    """Two floats with gradients, one without, a mask and indices; 3 x 4 x 5 and 5 x 4 x 5 elements do not divide."""
    toy = Toy("many", micro_batch_size=rows, hidden_size=5, num_micro_batches=3)
    for partitioned_flags in ([True, True, True, True, True], [False, True, True, False, False]):
        check_equal(run_ranks(4, _train_with_declarations, toy, partitioned_flags, 2), toy, tolerance=1e-12)


@pytest.mark.parametrize("partitioned_flags", [[True], [False], []], ids=["cut", "whole", "undeclared"])
def test_single_tensor_with_tensor_group_equals_one_process_bitwise(partitioned_flags: list[bool]) -> None:
    toy = Toy("chain", micro_batch_size=1, hidden_size=5, dtype=torch.float32)
    check_equal(run_ranks(4, _train_with_declarations, toy, partitioned_flags, 2), toy)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        shards = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(shards, x.contiguous(), group=group)
        ctx.rank = dist.get_rank(group)
        return torch.cat(shards, -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.chunk(2, -1)[ctx.rank].contiguous(), None


class ShardedDense(nn.Module):
    """``Dense`` with the rows of its weight cut over the tensor group; the bias is whole on every rank."""

    group: Any = None

    def __init__(self, seed: int, wide: int, dtype: torch.dtype) -> None:
        super().__init__()
        full = Dense(seed, wide, dtype).inner
        rank = dist.get_rank(ShardedDense.group)
        self.weight = nn.Parameter(full.weight.detach().chunk(2)[rank].clone())
        self.weight.model_parallel = True
        self.bias = nn.Parameter(full.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _Copy.apply(x, ShardedDense.group) @ self.weight.t()
        return torch.tanh(_Gather.apply(y, ShardedDense.group) + self.bias)


def _train_sharded(rank: int, toy: Toy) -> Any:
    tds.init_distributed("gloo", verbose=False)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ShardedDense.group = pairs[rank // 2]
    specs = [LayerSpec(ShardedDense, 10 + i, toy.hidden_size, toy.dtype) for i in range(toy.num_layers)]
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    module = PipelineModule(specs, topology=topology, loss_fn=toy.loss_fn, partition_method="uniform")
    return train_batch(make_engine(toy, 2, module=module), toy)


def test_norm_counts_sharded_and_replicated_parameters_once() -> None:
    toy = Toy("chain", grad_clip=0.01)
    loss, gradients = train_reference(toy)
    expected = grad_norm(gradients)
    for rank, (got_loss, got, norm) in enumerate(run_ranks(4, _train_sharded, toy)):
        assert abs(float(got_loss - loss)) < 1e-14
        assert norm == pytest.approx(expected, rel=1e-13)
        for name, gradient in got.items():
            full_gradient = gradients[name.replace(".weight", ".inner.weight").replace(".bias", ".inner.bias")]
            local_gradient = full_gradient.chunk(2)[rank % 2] if name.endswith("weight") else full_gradient
            clipped = {name: local_gradient * (toy.grad_clip / (expected + 1e-6))}
            assert worst_relative_error({name: gradient}, clipped) < 1e-12, name
